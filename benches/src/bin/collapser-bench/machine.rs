//! The machine: which core does what, and what a reader of the results must know about it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// The proxy has a core for itself; client and backend share another.
#[derive(Clone, Copy, Debug)]
pub struct Cores {
    proxy: Option<usize>,
    rest: Option<usize>,
}

impl Cores {
    /// The first two cores that this process may use. With only one, nothing is pinned.
    pub fn choose() -> anyhow::Result<Self> {
        let allowed = sched_getaffinity(None).context("cannot read the allowed cores")?;
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let (first, second) = (cores.next(), cores.next());
        if second.is_none() {
            eprintln!(
                "warning: there is one core only, so client and backend disturb the proxy; look at CPU time alone"
            );
            return Ok(Self { proxy: None, rest: None });
        }
        Ok(Self { proxy: first, rest: second })
    }

    /// Keeps this thread, and what it starts, on the core of client and backend.
    pub fn enter(self) -> anyhow::Result<()> {
        pin(self.rest)
    }

    /// Lets what this thread starts meanwhile run on the proxy's core.
    pub async fn as_proxy<T>(self, start: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        pin(self.proxy)?;
        let started = start.await;
        pin(self.rest)?;
        started
    }
}

fn pin(core: Option<usize>) -> anyhow::Result<()> {
    let Some(core) = core else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on core {core}"))
}

/// What the figures depend on.
#[derive(Clone, Debug, Serialize)]
pub struct About {
    /// UTC.
    date: String,
    cpu: String,
    cores: usize,
    memory_gib: f64,
    kernel: String,
    envoy: String,
    /// Of the repository, and whether files differ from it.
    commit: String,
    h2load: String,
    modules: Vec<Module>,
}

#[derive(Clone, Debug, Serialize)]
struct Module {
    name: String,
    bytes: u64,
}

impl About {
    /// Asks the system, and `envoy` for its version.
    pub fn gather(envoy: &Path, modules: &[(String, &Path)]) -> anyhow::Result<Self> {
        let module = |(name, path): &(String, &Path)| {
            let bytes = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
            anyhow::Ok(Module { name: name.clone(), bytes })
        };
        let changed =
            if said(Command::new("git").args(["status", "--porcelain", "filter", "envoy"])).is_empty() {
                ""
            } else {
                " and changes"
            };
        let version = said(Command::new(envoy).arg("--version"));
        // "…/envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL"
        let version = version.rsplit("version: ").next().and_then(|rest| rest.split('/').nth(1));
        Ok(Self {
            date: said(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"])),
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_gib: field("/proc/meminfo", "MemTotal")
                .and_then(|text| text.split(' ').next()?.parse::<f64>().ok())
                .map_or(0.0, |kib| (kib / 1024.0 / 1024.0 * 10.0).round() / 10.0),
            kernel: said(Command::new("uname").arg("-r")),
            envoy: version.unwrap_or("unknown").to_owned(),
            commit: said(Command::new("git").args(["rev-parse", "--short", "HEAD"])) + changed,
            h2load: said(Command::new("h2load").arg("--version")).replace("h2load ", ""),
            modules: modules.iter().map(module).collect::<Result<_, _>>()?,
        })
    }

    /// In a line, for people.
    pub fn line(&self) -> String {
        let modules = self.modules.iter().map(|module| format!("{} {} bytes", module.name, module.bytes));
        format!(
            "{}: {}, {} cores, Linux {}, Envoy {}, commit {}, {}",
            self.date,
            self.cpu,
            self.cores,
            self.kernel,
            self.envoy,
            self.commit,
            modules.collect::<Vec<_>>().join(", ")
        )
    }
}

/// The value of the first line of a file in /proc that begins with `name`.
fn field(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// What a program says, or nothing if there is no such program.
fn said(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).trim().to_owned()
}

/// Today's date, UTC.
pub fn today() -> String {
    said(Command::new("date").args(["-u", "+%Y-%m-%d"]))
}
