//! Shows on stderr how far a load is.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::load::Progress;
use crate::report::grouped;

/// How often a line says how far the load is, where there is no terminal to draw on.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// How progress is shown.
pub enum Display {
    /// Not at all.
    Hidden,
    /// As a bar.
    Bar(ProgressBar),
    /// As lines.
    Lines {
        /// When the last one was written.
        last: Instant,
    },
}

impl Display {
    /// A bar on a terminal, a line now and then elsewhere, nothing if `quiet`.
    pub fn new(quiet: bool) -> Self {
        if quiet {
            Self::Hidden
        } else if io::stderr().is_terminal() {
            Self::Bar(bar())
        } else {
            Self::Lines { last: Instant::now() }
        }
    }

    /// Shows how far the load is.
    pub fn show(&mut self, progress: Progress) {
        match self {
            Self::Hidden => {}
            Self::Bar(bar) => {
                // In calls where their number is known, in milliseconds elsewhere.
                let (position, length) = match (progress.calls, progress.duration) {
                    (Some(calls), _) => (progress.ended, calls),
                    (None, duration) => {
                        (progress.elapsed.as_millis() as u64, duration.unwrap_or_default().as_millis() as u64)
                    }
                };
                bar.set_length(length);
                bar.set_position(position.min(length));
                bar.set_message(words(progress));
            }
            Self::Lines { last } => {
                if last.elapsed() >= LINE_INTERVAL {
                    *last = Instant::now();
                    eprintln!("{}", words(progress));
                }
            }
        }
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    // The default style stands in for a template that this version does not know.
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} %  {msg}") {
        bar.set_style(style);
    }
    bar
}

fn words(progress: Progress) -> String {
    format!(
        "{:.1} s: {} calls ended, {} of them badly",
        progress.elapsed.as_secs_f64(),
        grouped(progress.ended),
        grouped(progress.bad)
    )
}
