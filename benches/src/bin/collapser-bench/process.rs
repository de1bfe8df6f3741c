//! What a process and its children take, as the system tells it.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};

/// CPU time that a process and all its descendants have taken.
pub fn cpu_time(root: u32) -> anyhow::Result<Duration> {
    let mut total = Duration::ZERO;
    for pid in tree(root)? {
        total += threads(pid)?;
    }
    Ok(total)
}

/// CPU time of every thread, in nanoseconds; `stat` of the process counts in hundredths of a second.
fn threads(pid: u32) -> anyhow::Result<Duration> {
    let mut total = 0;
    let folder = format!("/proc/{pid}/task");
    for task in fs::read_dir(&folder).with_context(|| format!("process {pid} is gone"))? {
        // A thread may end meanwhile.
        let Ok(line) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let nanos = line.split(' ').next().and_then(|nanos| nanos.parse::<u64>().ok());
        total += nanos.context("the kernel tells no CPU time in schedstat")?;
    }
    ensure!(total > 0, "the kernel tells no CPU time in {folder}/*/schedstat");
    Ok(Duration::from_nanos(total))
}

/// Memory of a process and all its descendants now, in KiB.
pub fn rss_kib(root: u32) -> anyhow::Result<u64> {
    tree(root)?.into_iter().map(|pid| status_kib(pid, "VmRSS:")).sum()
}

/// The most that it has been since [`reset_peak`].
pub fn peak_rss_kib(root: u32) -> anyhow::Result<u64> {
    tree(root)?.into_iter().map(|pid| status_kib(pid, "VmHWM:")).sum()
}

/// Forgets how much memory was in use at most.
pub fn reset_peak(root: u32) -> anyhow::Result<()> {
    for pid in tree(root)? {
        // Source: proc(5), clear_refs: 5 resets the peak.
        fs::write(format!("/proc/{pid}/clear_refs"), "5").context("cannot reset the peak of memory")?;
    }
    Ok(())
}

fn status_kib(pid: u32, field: &str) -> anyhow::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))
        .with_context(|| format!("process {pid} is gone"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse().with_context(|| format!("{field} is {line}"))
}

/// A process and its descendants.
fn tree(root: u32) -> anyhow::Result<Vec<u32>> {
    let mut tree = vec![root];
    let mut next = 0;
    while let Some(pid) = tree.get(next).copied() {
        next += 1;
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            tree.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    Ok(tree)
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    #[test]
    fn time_spent_is_counted() {
        let before = cpu_time(std::process::id()).unwrap();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(50) {
            black_box(start);
        }
        // Others may have had the core for a while.
        assert!(cpu_time(std::process::id()).unwrap() - before > Duration::from_millis(5));
    }

    #[test]
    fn children_belong_to_the_tree() {
        let mut child = Command::new("sleep").arg("10").spawn().unwrap();
        let tree = tree(std::process::id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(tree.unwrap().contains(&child.id()));
    }

    #[test]
    fn memory_is_told() {
        let pid = std::process::id();
        assert!(rss_kib(pid).unwrap() > 0 && peak_rss_kib(pid).unwrap() > 0);
    }
}
