//! The shipped alert rules.

use std::fs;

use serde_json::Value;

use crate::shipped;

pub struct Rules {
    pub alerts: Vec<Alert>,
}

pub struct Alert {
    pub name: String,
    pub expr: String,
}

impl Rules {
    /// Reads them, and checks that each says what it is about.
    pub fn read() -> Self {
        let text = fs::read_to_string(shipped("prometheus/rules.yml")).unwrap();
        let file: Value = serde_saphyr::from_str(&text).unwrap();
        let rules =
            file["groups"].as_array().unwrap().iter().flat_map(|group| group["rules"].as_array().unwrap());
        let alerts = rules.map(|rule| {
            let text =
                |value: &Value| value.as_str().unwrap_or_else(|| panic!("incomplete: {rule}")).to_owned();
            text(&rule["for"]);
            let severity = text(&rule["labels"]["severity"]);
            assert!(["warning", "critical"].contains(&severity.as_str()), "{rule}");
            for annotation in ["summary", "description"] {
                assert!(text(&rule["annotations"][annotation]).contains("$labels.pod"), "{rule}");
            }
            Alert { name: text(&rule["alert"]), expr: text(&rule["expr"]) }
        });
        Self { alerts: alerts.collect() }
    }
}
