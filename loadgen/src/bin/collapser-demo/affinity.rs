//! The demonstration of key affinity: several replicas, few keys, and a replica that dies.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use collapser_loadgen::args::parse_duration;
use collapser_loadgen::fleet::{self, Loss, Replica};
use collapser_loadgen::load::{self, LoadOptions};
use collapser_loadgen::progress::Display;
use collapser_loadgen::report::{Report, grouped};
use collapser_loadgen::sidecar::Sidecar;
use serde_json::{Value, json};

/// What is shown, and how large.
#[derive(Args)]
pub struct Affinity {
    /// Replicas, each a demo backend with its own sidecar.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(3..=32))]
    replicas: u8,
    /// Calls of each burst, all at once.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    calls: u64,
    /// Different keys that they ask for.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    keys: u64,
    /// How long a computation takes.
    #[arg(long, default_value = "2s", value_parser = parse_duration)]
    latency: Duration,
    /// The repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
}

/// For how long the sidecars keep what was computed: longer than the demonstration takes.
const TTL: &str = "10m";

impl Affinity {
    /// Shows all of it.
    ///
    /// # Errors
    /// If the promise is broken, too.
    pub async fn show(&self) -> anyhow::Result<()> {
        println!("starting   {} replicas, each a backend and its sidecar, and the front", self.replicas);
        let settings = json!({"cache_duration": TTL});
        let mut replicas = fleet::replicas(&self.root, self.replicas.into(), self.latency, &settings).await?;
        let front = self.front(&replicas, |_| ()).await?;
        println!("front      {}  ({})", front.addr(), front.metrics_url());
        println!(
            "sending    {} calls over {} keys at once; a computation takes {:?}\n",
            grouped(self.calls),
            self.keys,
            self.latency
        );
        println!("{:<29}{:>8}{:>9}{:>10}{:>15}", "", "ok", "failed", "time", "backend calls");

        self.burst("cold: nothing is cached", &front, &replicas, self.keys).await?;
        self.burst("warm: the same again", &front, &replicas, 0).await?;

        let loss = fleet::lose_one(&front, &mut replicas, &self.options(&front, "lost-")).await?;
        show_loss(&loss, &replicas);
        loss.check()?;

        println!("\nAnd where the front may retry what a dead replica had begun (`reset` in retry_on):\n");
        let replacement = Replica::start(&self.root, self.latency, settings).await?;
        replicas[loss.victim] = replacement;
        let front = self.front(&replicas, fleet::retry_resets).await?;
        let loss = fleet::lose_one(&front, &mut replicas, &self.options(&front, "again-")).await?;
        show_loss(&loss, &replicas);
        loss.check()?;
        ensure!(loss.during.is_clean(), "{} calls failed", loss.during.failed);
        Ok(())
    }

    async fn front(&self, replicas: &[Replica], edit: fn(&mut Value)) -> anyhow::Result<Sidecar> {
        fleet::front(&self.root, replicas, edit).await.context("the front")
    }

    fn options(&self, front: &Sidecar, key_prefix: &str) -> LoadOptions {
        LoadOptions {
            keys: self.keys,
            connections: 10,
            key_prefix: key_prefix.to_owned(),
            ..LoadOptions::burst(front.uri(), self.calls)
        }
    }

    /// A burst that must come to so many backend calls.
    async fn burst(
        &self,
        name: &str,
        front: &Sidecar,
        replicas: &[Replica],
        expected: u64,
    ) -> anyhow::Result<()> {
        let before = fleet::calls(replicas);
        let mut display = Display::new(false);
        let report = load::run(self.options(front, "key-"), |progress| display.show(progress)).await;
        display.clear();
        let (report, calls) = (report?, fleet::calls(replicas) - before);
        line(name, &report, Some(calls));
        ensure!(report.is_clean(), "{} calls failed, {} answers were wrong", report.failed, report.wrong);
        ensure!(calls == expected, "{calls} backend calls, not {expected}: {:?}", fleet::owners(replicas));
        Ok(())
    }
}

fn line(name: &str, report: &Report, calls: Option<u64>) {
    let calls = calls.map(grouped).unwrap_or_default();
    let seconds = report.elapsed_seconds;
    println!("{name:<29}{:>8}{:>9}{seconds:>8.3} s{calls:>15}", grouped(report.ok), grouped(report.failed));
}

fn show_loss(loss: &Loss, replicas: &[Replica]) {
    let Loss { victim, waiting, keys, lost, moved, .. } = loss;
    line("in flight when a replica dies", &loss.during, None);
    line("sent right after", &loss.after, None);
    println!("{:<56}{:>15}", "both", grouped(loss.backend_calls));
    println!(
        "\nreplica {} of {} died with {} callers; keys lost: {lost} of {keys}, moved: {moved}, backend calls more: {}",
        victim + 1,
        replicas.len(),
        grouped(*waiting),
        loss.backend_calls - keys
    );
}
