//! The public HTTP cache tests, through the gateway and through other caches: whether what the
//! filter is known to pass it passes still, and a table of all of them side by side.

mod known;
mod proxies;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};

use anyhow::{Context as _, ensure};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use known::Known;
use proxies::{Origin, Proxy};

/// Runs the public HTTP cache tests through the gateway, nginx and Varnish, one after the other.
///
/// Exit status: 0 when the filter's results are those that are listed, 1 when they are not or the tests cannot be run.
#[derive(Parser)]
struct Args {
    /// What to test.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Cache::Collapser, Cache::Nginx, Cache::Varnish])]
    only: Vec<Cache>,
    /// Where the tests are, with node-fetch in node_modules beside them.
    #[arg(long, default_value = ".tools/http-cache-tests")]
    tests: PathBuf,
    /// Write the table here; without it, it is printed.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write the filter's results into the list in place of comparing the two. Reasons that are there stay.
    #[arg(long)]
    bless: bool,
    /// The repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
}

/// A cache to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cache {
    /// The gateway of `envoy/gateway.yaml`.
    Collapser,
    /// nginx with `benches/http-cache/nginx.conf`.
    Nginx,
    /// Varnish with `benches/http-cache/varnish.vcl`.
    Varnish,
}

/// What came of one test.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The group that it belongs to.
    pub suite: String,
    /// Its name in the list.
    pub id: String,
    /// What a failure would mean.
    pub kind: Kind,
    /// How it ended.
    pub verdict: Verdict,
    /// Why it did not pass; empty if it did.
    pub message: String,
}

/// What a test is for. Source: the tests' own README.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A failure is against the specification.
    Required,
    /// A failure is no fault, but a chance missed.
    Optimal,
    /// A question about behaviour, with no wrong answer.
    Check,
}

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It passed; a question was answered with yes.
    Pass,
    /// It did not.
    Fail,
    /// What it rests on did not work, so it says nothing.
    Untested,
}

/// All outcomes of one cache.
pub struct Column {
    /// Its name and version.
    pub name: String,
    /// In the tests' order.
    pub outcomes: Vec<Outcome>,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(&Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> anyhow::Result<()> {
    // Before minutes are spent on the others.
    for cache in &args.only {
        proxies::require(*cache)?;
    }
    let origin = Origin::start(&args.tests).await?;
    let mut columns = Vec::new();
    let mut ours = None;
    for cache in &args.only {
        let proxy = Proxy::start(*cache, &args.root, origin.addr()).await?;
        eprintln!("testing {} (a minute or so)", proxy.name());
        let outcomes = test(args, *cache, &proxy.uri()).await?;
        if *cache == Cache::Collapser {
            ours = Some(outcomes.clone());
        }
        columns.push(Column { name: proxy.name().to_owned(), outcomes });
    }
    drop(origin);

    let text = table::markdown(&columns);
    match &args.out {
        Some(path) => fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?,
        None => print!("{text}"),
    }
    match ours {
        Some(outcomes) => compare(args, &outcomes),
        None => Ok(()),
    }
}

/// Runs all tests; raw results stay in `target/http-cache` for whoever wants to know why one failed.
async fn test(args: &Args, cache: Cache, uri: &str) -> anyhow::Result<Vec<Outcome>> {
    let done = Command::new("node")
        .arg(args.root.join("benches/http-cache/run.mjs"))
        .args([args.tests.as_os_str(), uri.as_ref()])
        .stderr(Stdio::null())
        .output()
        .await
        .context("cannot run node")?;
    ensure!(done.status.success(), "the tests themselves failed ({})", done.status);
    let folder = args.root.join("target/http-cache");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join(format!("{cache:?}.json").to_lowercase()), &done.stdout)?;
    serde_json::from_slice(&done.stdout).context("the tests wrote no results")
}

fn compare(args: &Args, outcomes: &[Outcome]) -> anyhow::Result<()> {
    let path = args.root.join("benches/http-cache/collapser.yaml");
    if args.bless {
        let known = if path.exists() { Known::read(&path)? } else { Known::default() };
        return write(&path, &known.updated(outcomes));
    }
    let known = Known::read(&path)?;
    let faults = known.faults(outcomes);
    ensure!(
        faults.is_empty(),
        "the results are not those of {}:\n  {}\nto take them over: make http-cache-tests BLESS=1",
        path.display(),
        faults.join("\n  ")
    );
    let passed = outcomes.iter().filter(|outcome| outcome.verdict == Verdict::Pass).count();
    println!("{passed} of {} tests pass, as listed in {}", outcomes.len(), path.display());
    Ok(())
}

fn write(path: &Path, known: &Known) -> anyhow::Result<()> {
    fs::write(path, known.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    println!("written: {}", path.display());
    Ok(())
}
