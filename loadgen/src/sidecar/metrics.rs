//! Metrics as Prometheus would scrape them.

use std::collections::BTreeMap;

/// Metrics by their name with labels, as in `collapser_errors_total{code="14"}`; a metric without labels is
/// found by its bare name.
#[derive(Clone, Debug, Default)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Reads the Prometheus text format.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let pair = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.trim_end_matches("{}").to_string(), value.parse().ok()?))
        };
        Self(lines.filter_map(pair).collect())
    }

    /// The value of a metric; 0 if there is none of that name.
    pub fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// The sum over all labels.
    pub fn sum(&self, name: &str) -> f64 {
        let of_name =
            |key: &str| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
        self.0.iter().filter(|(key, _)| of_name(key)).map(|(_, value)| value).sum()
    }

    /// Whether there is a metric of that name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_with_and_without_labels() {
        let metrics =
            Metrics::parse("# TYPE a counter\na{} 3\nb{code=\"1\"} 4\nb{code=\"2\"} 5\nbc{} 1\n\nodd\n");
        assert_eq!(metrics.get("a"), 3.0);
        assert_eq!(metrics.get("b{code=\"2\"}"), 5.0);
        assert_eq!(metrics.sum("b"), 9.0);
        assert!(metrics.has("bc") && !metrics.has("odd"));
    }
}
