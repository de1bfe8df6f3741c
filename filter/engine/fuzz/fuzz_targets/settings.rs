//! Any bytes as the filter's configuration, and any text as an environment variable.
#![no_main]

use collapser_engine::settings::Settings;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let cut = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (json, variable) = (&data[..cut], data.get(cut + 1..).unwrap_or_default());
    let variable = String::from_utf8_lossy(variable).into_owned();
    match Settings::load(json, |_| Some(variable.clone())) {
        Ok(settings) => {
            assert!(!settings.cluster.is_empty());
            assert!(settings.max_waiters > 0 && !settings.backend_timeout.is_zero());
            assert!(settings.key_headers.is_sorted());
        }
        Err(faults) => assert!(faults.iter().all(|fault| fault.contains("allowed: "))),
    }
});
