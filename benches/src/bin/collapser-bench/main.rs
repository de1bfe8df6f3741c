//! Benchmarks of the whole sidecar: a real Envoy in several configurations, side by side.

mod backend;
mod bench;
mod candidate;
mod check;
mod client;
mod h2load;
mod machine;
mod memory;
mod process;
mod results;
mod scale;
mod scenario;
mod stats;
mod wire;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use clap::{Args, Parser, Subcommand};
use collapser_loadgen::sidecar::SidecarOptions;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use bench::Bench;
use candidate::{Candidate, Kind};
use h2load::H2load;
use machine::{About, Cores};
use results::{Outcome, Results, memory_table};
use scale::Scale;

/// Measures the sidecar beside Envoy without the filter.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Every load against every candidate, in turn.
    E2e(E2e),
    /// How the cost of a call depends on cached keys, waiting callers, key headers and workers.
    Scale(ScaleOptions),
}

#[derive(Args)]
struct Common {
    /// Rounds of each candidate.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// How long a round takes.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The filter's module.
    #[arg(long, default_value = "target/collapser.wasm", env = "COLLAPSER_MODULE")]
    module: PathBuf,
    /// The repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
    /// Where the raw results go, as JSON.
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Args)]
struct E2e {
    #[command(flatten)]
    common: Common,
    /// Only this load; may be given several times. `waiter-memory` is one too.
    #[arg(long)]
    scenario: Vec<String>,
    /// Only these candidates.
    #[arg(long, value_delimiter = ',')]
    candidates: Vec<String>,
    /// A further candidate: the filter with another module.
    #[arg(long, value_name = "NAME=MODULE")]
    also: Vec<String>,
    /// A further candidate: a command that listens on LISTEN_PORT and forwards to BACKEND_ADDRESS.
    #[arg(long, env = "PEER_CMD")]
    peer: Option<String>,
    /// Compare with what is promised; fail if it is not kept.
    #[arg(long)]
    check: bool,
}

#[derive(Args)]
struct ScaleOptions {
    #[command(flatten)]
    common: Common,
    /// Only this one: keys, waiters, headers or workers; may be given several times.
    #[arg(long)]
    curve: Vec<String>,
}

const MEMORY: &str = "waiter-memory";

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    raise_open_files()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match cli.command {
        Task::E2e(options) => runtime.block_on(e2e(&options)),
        Task::Scale(options) => runtime.block_on(scale(&options)),
    }
}

async fn e2e(options: &E2e) -> anyhow::Result<ExitCode> {
    let candidates = options.candidates()?;
    let mut scenarios = scenario::all();
    let names: Vec<_> =
        scenarios.iter().map(|scenario| scenario.name.clone()).chain([MEMORY.into()]).collect();
    for name in &options.scenario {
        ensure!(names.contains(name), "there is no load {name}; there are {}", names.join(", "));
    }
    let wanted = |name: &str| options.scenario.is_empty() || options.scenario.iter().any(|one| one == name);
    scenarios.retain(|scenario| wanted(&scenario.name));

    let about = about(&options.common, &candidates)?;
    println!("{}", about.line());
    let h2load = H2load::find()?;
    let bench = options.common.bench(&h2load)?;
    let mut results = Results { about, rounds: bench.rounds, scenarios: Vec::new(), memory: Vec::new() };
    let progress = progress(scenarios.len() + usize::from(wanted(MEMORY)));
    for scenario in &scenarios {
        progress.set_message(scenario.name.clone());
        let contenders = bench.run(scenario, &candidates, || progress.tick()).await?;
        let outcome = Outcome::new(scenario, &contenders);
        progress.suspend(|| print!("{}", outcome.table()));
        progress.inc(1);
        results.scenarios.push(outcome);
    }
    if wanted(MEMORY) {
        progress.set_message(MEMORY);
        results.memory = memory::measure(&bench, &candidates, || progress.tick()).await?;
        progress.suspend(|| print!("{}", memory_table(&results.memory)));
    }
    progress.finish_and_clear();
    write(&options.common, "e2e", &results)?;
    if options.check && !check::check(&results.scenarios, &results.memory) {
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

async fn scale(options: &ScaleOptions) -> anyhow::Result<ExitCode> {
    let ScaleOptions { common, curve: wanted } = options;
    let names = scale::CURVES.map(|(name, _)| name);
    for name in wanted {
        ensure!(names.contains(&name.as_str()), "nothing is called {name}; there are {}", names.join(", "));
    }
    let chosen =
        scale::CURVES.into_iter().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|w| w == name));
    let chosen: Vec<_> = chosen.collect();
    let plain = Candidate { name: "plain".to_owned(), kind: Kind::Plain };
    let candidates = [plain, Candidate::filter("filter", common.module.clone())];
    let about = about(common, &candidates)?;
    println!("{}\n", about.line());
    let h2load = H2load::find()?;
    let bench = common.bench(&h2load)?;
    let progress = progress(chosen.iter().map(|(_, steps)| steps).sum());
    let mut results = Scale { about, rounds: bench.rounds, curves: Vec::new() };
    for (name, _) in chosen {
        let shown = |point: &scale::Point| {
            progress.suspend(|| print!("{}", point.lines(name)));
            progress.inc(1);
        };
        results.curves.push(scale::measure(&bench, &candidates, name, shown).await?);
    }
    progress.finish_and_clear();
    write(common, "scale", &results)?;
    Ok(ExitCode::SUCCESS)
}

impl Common {
    fn bench<'a>(&'a self, h2load: &'a H2load) -> anyhow::Result<Bench<'a>> {
        ensure!(self.rounds > 0 && self.seconds > 0.0, "there must be rounds, and they must take time");
        let cores = Cores::choose()?;
        cores.enter()?;
        Ok(Bench { root: &self.root, cores, rounds: self.rounds, seconds: self.seconds, h2load })
    }
}

impl E2e {
    fn candidates(&self) -> anyhow::Result<Vec<Candidate>> {
        let named = |name: &str, kind| Candidate { name: name.to_owned(), kind };
        let mut all = vec![
            named("plain", Kind::Plain),
            named("direct", Kind::Direct),
            Candidate::filter("filter", self.common.module.clone()),
        ];
        for also in &self.also {
            let (name, module) =
                also.split_once('=').with_context(|| format!("`{also}` is not NAME=MODULE"))?;
            all.push(Candidate::filter(name, module.into()));
        }
        if let Some(command) = self.peer.as_deref().filter(|command| !command.is_empty()) {
            all.push(named("peer", Kind::Peer(command.to_owned())));
        }
        let names: Vec<_> = all.iter().map(|candidate| candidate.name.clone()).collect();
        for name in &self.candidates {
            ensure!(names.contains(name), "there is no candidate {name}; there are {}", names.join(", "));
        }
        if !self.candidates.is_empty() {
            all.retain(|candidate| self.candidates.contains(&candidate.name));
        }
        Ok(all)
    }
}

fn about(common: &Common, candidates: &[Candidate]) -> anyhow::Result<About> {
    let modules = candidates.iter().filter_map(|candidate| match &candidate.kind {
        Kind::Filter(module) => Some((candidate.name.clone(), module.as_path())),
        _ => None,
    });
    let envoy = SidecarOptions::shipped(&common.root, ([127, 0, 0, 1], 0).into()).envoy;
    About::gather(&envoy, &modules.collect::<Vec<_>>())
}

/// Writes the raw results where they were asked for, or beside the others under today's date.
fn write(common: &Common, kind: &str, results: &impl Serialize) -> anyhow::Result<()> {
    let folder = common.root.join("benches/results");
    let path = common.out.clone().unwrap_or_else(|| folder.join(format!("{kind}-{}.json", machine::today())));
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(&path, serde_json::to_string_pretty(results)? + "\n")
        .with_context(|| format!("cannot write {}", path.display()))?;
    println!("\nraw results: {}", shown(&path));
    Ok(())
}

fn shown(path: &Path) -> String {
    path.strip_prefix(".").unwrap_or(path).display().to_string()
}

/// Thousands of connections need more open files than a shell allows by default.
fn raise_open_files() -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .context("cannot raise the limit of open files")
}

fn progress(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    // The default style stands in for a template that this version does not know.
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {spinner} {msg}") {
        bar.set_style(style);
    }
    bar
}
