//! The engine in one table: time and allocations of each operation natively, and its time as Wasm.
//!
//! Natively and in each Wasm module the samples take turns, so that whatever else the machine does meets all alike, and
//! the ratios hold where the times do not. Writes `benches/results/engine.json` and `engine.md`.
//!
//! The Wasm modules are made by `make bench`; `COLLAPSER_BENCH_GUESTS` is the folder that they are in.

use anyhow::{Context, Result, bail, ensure};
use collapser_benches::alloc::{Count, Counting, counted};
use collapser_benches::{OPERATIONS, Operation, Spec};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};
use wasmtime::{Caller, Engine, Extern, Linker, Module, Store, TypedFunc};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How long one sample takes at least, where an operation can be repeated that often.
const SAMPLE: Duration = Duration::from_millis(1);

/// How long all samples of one operation take, about; with its preparations.
const BUDGET: Duration = Duration::from_secs(3);

/// Samples of one operation, in each place that it runs in.
const SAMPLES: std::ops::RangeInclusive<usize> = 11..=301;

/// The Wasm modules, by file name, and what each is.
const GUESTS: [(&str, &str); 4] = [
    ("opt.wasm", "Wasm, after wasm-opt"),
    ("plain.wasm", "Wasm, before wasm-opt"),
    ("simd-opt.wasm", "with simd128, after wasm-opt"),
    ("simd.wasm", "with simd128, before wasm-opt"),
];

/// Where an operation runs.
enum Subject {
    Native(Box<dyn Operation>),
    Wasm(Box<Guest>),
}

/// The engine in a Wasm VM.
struct Guest {
    store: Store<()>,
    prepare: TypedFunc<u64, ()>,
    run: TypedFunc<u64, ()>,
}

impl Guest {
    fn start(engine: &Engine, module: &Module, operation: usize) -> Result<Self> {
        let mut linker = Linker::new(engine);
        linker.func_wrap("wasi_snapshot_preview1", "random_get", fill_with_some_bytes)?;
        // Whatever else the standard library brings along is not called.
        linker.define_unknown_imports_as_traps(module)?;
        let mut store = Store::new(engine, ());
        let instance = linker.instantiate(&mut store, module)?;
        if let Some(initialize) = instance.get_func(&mut store, "_initialize") {
            initialize.typed::<(), ()>(&store)?.call(&mut store, ())?;
        }
        let choose = instance.get_typed_func::<u32, ()>(&mut store, "choose")?;
        choose.call(&mut store, u32::try_from(operation)?)?;
        let prepare = instance.get_typed_func(&mut store, "prepare")?;
        let run = instance.get_typed_func(&mut store, "run")?;
        Ok(Self { store, prepare, run })
    }
}

/// Seeds need not be good ones here.
fn fill_with_some_bytes(mut caller: Caller<'_, ()>, at: u32, size: u32) -> u32 {
    const FAULT: u32 = 21;
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else { return FAULT };
    let bytes: Vec<u8> = (0..size).map(|n| (n as u8).wrapping_mul(151).wrapping_add(43)).collect();
    memory.write(&mut caller, at as usize, &bytes).map_or(FAULT, |()| 0)
}

impl Subject {
    fn sample(&mut self, times: u64) -> Result<Duration> {
        Ok(match self {
            Self::Native(operation) => {
                operation.prepare(times);
                let start = Instant::now();
                operation.run(times);
                start.elapsed()
            }
            Self::Wasm(guest) => {
                guest.prepare.call(&mut guest.store, times)?;
                let start = Instant::now();
                guest.run.call(&mut guest.store, times)?;
                start.elapsed()
            }
        })
    }

    /// How often to run it in one sample.
    fn times(&mut self, most: u64) -> Result<u64> {
        let mut times = 1;
        while times < most && self.sample(times)? < SAMPLE {
            times = (times * 2).min(most);
        }
        Ok(times)
    }
}

/// Nanoseconds for one run.
#[derive(Clone, Copy, Debug, Serialize)]
struct Times {
    min: f64,
    median: f64,
    max: f64,
    samples: usize,
}

impl Times {
    fn of(mut nanos: Vec<f64>) -> Self {
        nanos.sort_by(f64::total_cmp);
        let at = |n: usize| nanos.get(n).copied().unwrap_or(f64::NAN);
        Self {
            min: at(0),
            median: at(nanos.len() / 2),
            max: at(nanos.len().saturating_sub(1)),
            samples: nanos.len(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    operation: String,
    parts: u64,
    must_nanos: Option<f64>,
    allocations: f64,
    bytes_allocated: f64,
    native_nanos: Times,
    /// By module, in the order of [`GUESTS`].
    wasm_nanos: Vec<Option<Times>>,
}

#[derive(Debug, Serialize)]
struct Machine {
    date: String,
    cpu: String,
    cores: usize,
    load_at_start: String,
    rustc: String,
    wasm_opt: String,
    wasmtime: String,
}

#[derive(Debug, Serialize)]
struct Report {
    machine: Machine,
    wasm: Vec<&'static str>,
    rows: Vec<Row>,
}

fn first_line(program: &str) -> String {
    let output = Command::new(program).arg("--version").output().ok();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    text.and_then(|text| text.lines().next().map(String::from)).unwrap_or("not installed".into())
}

fn machine() -> Machine {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let lock = read(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock"));
    let wasmtime =
        lock.split("name = \"wasmtime\"\nversion = \"").nth(1).and_then(|rest| rest.split('"').next());
    Machine {
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        cpu: cpu.map_or("unknown", |(_, model)| model).to_string(),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        load_at_start: read("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" "),
        rustc: first_line("rustc"),
        wasm_opt: first_line("wasm-opt"),
        wasmtime: wasmtime.unwrap_or("unknown").to_string(),
    }
}

/// Allocations of one run, on the average of many.
fn allocations(spec: &Spec) -> (f64, f64) {
    let mut operation = (spec.create)();
    let times = spec.most.min(1_000);
    // Whatever grows, grows the first time.
    for _ in 0..2 {
        operation.prepare(times);
        operation.run(times);
    }
    operation.prepare(times);
    let Count { allocations, bytes } = counted(|| operation.run(times));
    (allocations as f64 / times as f64, bytes as f64 / times as f64)
}

fn measure(number: usize, spec: &Spec, engine: &Engine, modules: &[Option<Module>]) -> Result<Row> {
    let (allocations, bytes_allocated) = allocations(spec);
    let mut subjects = vec![Some(Subject::Native((spec.create)()))];
    for module in modules {
        subjects.push(match module {
            Some(module) if spec.wasm => Some(Subject::Wasm(Box::new(Guest::start(engine, module, number)?))),
            _ => None,
        });
    }
    let mut times = Vec::new();
    for subject in &mut subjects {
        times.push(subject.as_mut().map_or(Ok(0), |subject| subject.times(spec.most))?);
    }
    let mut nanos = vec![Vec::new(); subjects.len()];
    let start = Instant::now();
    for round in 0..*SAMPLES.end() {
        if round >= *SAMPLES.start() && start.elapsed() > BUDGET {
            break;
        }
        for ((subject, times), nanos) in subjects.iter_mut().zip(&times).zip(&mut nanos) {
            if let Some(subject) = subject {
                nanos.push(subject.sample(*times)?.as_nanos() as f64 / *times as f64);
            }
        }
    }
    let mut all = nanos.into_iter().map(|nanos| (!nanos.is_empty()).then(|| Times::of(nanos)));
    let native_nanos = all.next().flatten().context("no native sample")?;
    Ok(Row {
        operation: spec.name(),
        parts: spec.parts,
        must_nanos: spec.must,
        allocations,
        bytes_allocated,
        native_nanos,
        wasm_nanos: all.collect(),
    })
}

fn modules(engine: &Engine) -> Result<Vec<Option<Module>>> {
    let folder = std::env::var_os("COLLAPSER_BENCH_GUESTS").map(PathBuf::from);
    let Some(folder) = folder else { bail!("COLLAPSER_BENCH_GUESTS is not set; run this by `make bench`") };
    let load = |(file, what): (&str, &str)| {
        let path = folder.join(file);
        // Only what wasm-opt makes may be missing: it is not on every machine.
        if !path.exists() && file.contains("opt") {
            eprintln!("note: no {}, so no column \"{what}\"; is wasm-opt installed?", path.display());
            return Ok(None);
        }
        let module = Module::from_file(engine, &path);
        let module = module.map_err(anyhow::Error::from);
        module.map(Some).with_context(|| format!("{}; run `make bench`", path.display()))
    };
    GUESTS.into_iter().map(load).collect()
}

fn number(value: f64) -> String {
    let text = match value {
        v if v < 99.5 => return format!("{v:.1}"),
        v => format!("{v:.0}"),
    };
    let mut grouped = String::new();
    for (n, digit) in text.chars().enumerate() {
        if n > 0 && (text.len() - n).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn count(value: f64) -> String {
    if value.fract() == 0.0 && value < 100.0 { format!("{value}") } else { number(value) }
}

fn native_table(rows: &[Row]) -> Result<String> {
    let mut out = String::new();
    writeln!(
        out,
        "| operation | ns, median | min | max | ns each part | must | allocations | bytes allocated |"
    )?;
    writeln!(out, "|---|--:|--:|--:|--:|--:|--:|--:|")?;
    for row in rows {
        let Times { min, median, max, .. } = row.native_nanos;
        let part = if row.parts > 1 { number(median / row.parts as f64) } else { String::new() };
        let must = row.must_nanos.map_or(String::new(), |must| {
            format!("≤ {must} {}", if median <= must { "yes" } else { "**no**" })
        });
        writeln!(
            out,
            "| {} | {} | {} | {} | {part} | {must} | {} | {} |",
            row.operation,
            number(median),
            number(min),
            number(max),
            count(row.allocations),
            count(row.bytes_allocated),
        )?;
    }
    Ok(out)
}

fn wasm_table(rows: &[Row]) -> Result<String> {
    let mut out = String::from("| operation | native |");
    GUESTS.iter().try_for_each(|(_, what)| write!(out, " {what} |"))?;
    writeln!(out, "\n|---|--:|{}", "--:|".repeat(GUESTS.len()))?;
    for row in rows.iter().filter(|row| row.wasm_nanos.iter().any(Option::is_some)) {
        write!(out, "| {} | {} |", row.operation, number(row.native_nanos.median))?;
        for times in &row.wasm_nanos {
            match times {
                Some(times) => {
                    let ratio = times.median / row.native_nanos.median;
                    write!(out, " {} (× {ratio:.1}) |", number(times.median))?;
                }
                None => write!(out, " |")?,
            }
        }
        writeln!(out)?;
    }
    Ok(out)
}

fn markdown(report: &Report) -> Result<String> {
    let Machine { date, cpu, cores, load_at_start, rustc, wasm_opt, wasmtime } = &report.machine;
    let (native, wasm) = (native_table(&report.rows)?, wasm_table(&report.rows)?);
    Ok(format!(
        "# The engine alone\n\n\
         Made by `make bench`; the same in full is in `engine.json`.\n\n\
         {date}, {cpu}, {cores} cores, load {load_at_start} at the start; {rustc}, {wasm_opt}, wasmtime {wasmtime}.\n\n\
         ## Native\n\n\
         One run of each operation: nanoseconds, and what it allocates once its tables have grown.\n\n\
         {native}\n\
         ## Native and Wasm\n\n\
         Medians in nanoseconds, and how many times the native time that is. The samples of a row took turns. Wasm runs \
         in wasmtime (Cranelift); Envoy compiles with V8, so the ratios between the columns of Wasm say more than \
         those to native. All modules are built as the filter is.\n\n\
         {wasm}"
    ))
}

/// One line for a person who waits: hits and misses of what must be.
fn verdicts(rows: &[Row]) -> Vec<String> {
    let judged = rows.iter().filter_map(|row| Some((row, row.must_nanos?)));
    let verdict = |(row, must): (&Row, f64)| {
        let median = row.native_nanos.median;
        let met = if median <= must { "met" } else { "MISSED" };
        format!("{met}: {} takes {median:.1} ns, must be ≤ {must} ns", row.operation)
    };
    judged.map(verdict).collect()
}

fn main() -> Result<()> {
    // What a call by `cargo test --benches` means is only whether this starts.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let wanted = |spec: &Spec| only.as_ref().is_none_or(|only| spec.name().contains(only.as_str()));
    let machine = machine();
    let engine = Engine::default();
    let modules = modules(&engine)?;

    let bar = ProgressBar::new(OPERATIONS.iter().filter(|spec| wanted(spec)).count() as u64)
        .with_style(ProgressStyle::with_template("{pos}/{len} [{elapsed}] {msg}")?);
    let mut rows = Vec::new();
    for (number, spec) in OPERATIONS.iter().enumerate().filter(|(_, spec)| wanted(spec)) {
        bar.set_message(spec.name());
        let row = measure(number, spec, &engine, &modules).with_context(|| spec.name())?;
        bar.suspend(|| println!("{:<40} {:>12} ns", row.operation, self::number(row.native_nanos.median)));
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    ensure!(!rows.is_empty(), "no operation has that in its name");

    let report = Report { machine, wasm: GUESTS.map(|(_, what)| what).to_vec(), rows };
    let text = markdown(&report)?;
    println!("\n{text}");
    verdicts(&report.rows).iter().for_each(|verdict| println!("{verdict}"));
    if only.is_none() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("engine.md"), text)?;
        std::fs::write(folder.join("engine.json"), serde_json::to_string_pretty(&report)? + "\n")?;
        println!("written: benches/results/engine.md and engine.json");
    }
    Ok(())
}
