//! The shipped dashboard and data source.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::{prometheus, shipped};

/// The dashboard, as Grafana reads it.
pub struct Dashboard {
    json: Value,
    targets: Vec<Target>,
}

/// A query of a panel.
pub struct Target {
    pub title: String,
    pub expr: String,
    pub legend: String,
    /// Asked once, for the end of the time range; otherwise for all of it.
    pub instant: bool,
}

/// What Grafana puts into a query.
#[derive(Clone, Copy)]
pub struct Substitution<'a> {
    pub range: &'a str,
    pub rate_interval: &'a str,
    pub pod: &'a str,
}

impl Substitution<'_> {
    pub fn apply(&self, expr: &str) -> String {
        let query = expr
            .replace("$__range", self.range)
            .replace("$__rate_interval", self.rate_interval)
            .replace("$namespace", "collapser")
            .replace("$pod", self.pod);
        assert!(!query.contains('$'), "unknown variable: {query}");
        query
    }
}

impl Dashboard {
    pub fn read() -> Self {
        let text = fs::read_to_string(shipped("grafana/collapser.json")).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        let targets = array(&json["panels"]).iter().flat_map(targets_of).collect();
        Self { json, targets }
    }

    pub fn targets(&self) -> impl Iterator<Item = &Target> {
        self.targets.iter()
    }

    /// The first query of a panel.
    pub fn target(&self, title: &str) -> &Target {
        self.targets().find(|target| target.title == title).unwrap_or_else(|| panic!("no panel \"{title}\""))
    }

    /// A variable's label, and the series that it is read from: `label_values(SERIES, LABEL)`.
    pub fn variable(&self, name: &str) -> (String, String) {
        let variables = array(&self.json["templating"]["list"]);
        let variable = variables.iter().find(|variable| variable["name"] == name).unwrap();
        assert_eq!(variable["datasource"]["uid"], datasource()["uid"]);
        let query = text(&variable["query"]["query"]);
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
        let (matcher, label) = inner.rsplit_once(',').unwrap();
        (label.trim().to_owned(), matcher.trim().to_owned())
    }

    /// Each panel has title, description and unit, names the provisioned data source, and lies beside the others.
    pub fn assert_complete(&self) {
        let uid = &datasource()["uid"];
        let panels = array(&self.json["panels"]);
        let (mut ids, mut titles, mut cells) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for panel in panels {
            let title = text(&panel["title"]);
            assert!(titles.insert(title), "two panels are called \"{title}\"");
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "the id of \"{title}\" is another's");
            assert!(text(&panel["description"]).len() > 20, "\"{title}\" has no description");
            assert!(!text(&panel["fieldConfig"]["defaults"]["unit"]).is_empty(), "\"{title}\" has no unit");
            assert_eq!(&panel["datasource"]["uid"], uid, "{title}");
            let targets = array(&panel["targets"]);
            assert!(!targets.is_empty(), "\"{title}\" asks for nothing");
            for target in targets {
                assert_eq!(&target["datasource"]["uid"], uid, "{title}");
            }
            let at = |name: &str| panel["gridPos"][name].as_u64().unwrap();
            assert!(at("x") + at("w") <= 24, "\"{title}\" is too far right");
            for cell in
                (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y)))
            {
                assert!(cells.insert(cell), "\"{title}\" lies on another panel");
            }
        }
    }
}

fn targets_of(panel: &Value) -> Vec<Target> {
    let target = |target: &Value| Target {
        title: text(&panel["title"]).to_owned(),
        expr: text(&target["expr"]).to_owned(),
        legend: text(&target["legendFormat"]).to_owned(),
        instant: target["instant"] == true,
    };
    array(&panel["targets"]).iter().map(target).collect()
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn datasource() -> Value {
    let text = fs::read_to_string(shipped("grafana/datasource.yaml")).unwrap();
    let sources: Value = serde_saphyr::from_str(&text).unwrap();
    sources["datasources"][0].clone()
}

/// The interval that the data source tells Grafana.
pub fn scrape_interval() -> String {
    text(&datasource()["jsonData"]["timeInterval"]).to_owned()
}

/// The shortest `$__rate_interval` that Grafana chooses. Source: Grafana docs, "Prometheus template variables".
pub fn rate_interval() -> String {
    let seconds: u64 = prometheus::scrape_interval().strip_suffix('s').unwrap().parse().unwrap();
    format!("{}s", 4 * seconds)
}

/// The metrics that a query names; where it does so by a regular expression, the selector that stands for it.
pub fn metric_names(expr: &str) -> BTreeSet<String> {
    const BY_PATTERN: &str = "__name__=~\"";
    let mut pieces = expr.split(BY_PATTERN);
    let mut named = pieces.next().unwrap_or_default().to_owned();
    let mut names = BTreeSet::new();
    for piece in pieces {
        let (pattern, rest) = piece.split_once('"').unwrap();
        names.insert(format!("{{{BY_PATTERN}{pattern}\"}}"));
        named += rest;
    }
    let words = named.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_metric = |word: &&str| {
        (word.starts_with("collapser_") || word.starts_with("envoy_")) && *word != "envoy_cluster_name"
    };
    names.extend(words.filter(is_metric).map(str::to_owned));
    names
}
