//! Any bytes as the filter's configuration, and any text as an environment variable.
#![no_main]

use collapser_engine::policy::Policy;
use collapser_engine::settings::{Mode, Settings};
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

fuzz_target!(|data: &[u8]| {
    let cut = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (json, variable) = (&data[..cut], data.get(cut + 1..).unwrap_or_default());
    let variable = String::from_utf8_lossy(variable).into_owned();
    match Settings::load(json, |_| Some(variable.clone())) {
        Ok(settings) => {
            assert!(settings.mode == Mode::Affinity || !settings.cluster.is_empty());
            assert!(settings.max_waiters > 0 && !settings.backend_timeout.is_zero());
            assert!(settings.key_headers.is_sorted());
            assert!(settings.policies.all().all(|(_, policy)| is_in_range(policy)));
        }
        Err(faults) => assert!(faults.iter().all(|fault| fault.contains("; allowed"))),
    }
});

fn is_in_range(policy: &Policy) -> bool {
    let most = Duration::from_secs(24 * 3_600);
    (0.0..=10.0).contains(&policy.early_refresh)
        && (0.0..=1.0).contains(&policy.ttl_jitter)
        && policy.ttl.max(policy.stale_if_error).max(policy.stale_while_revalidate) <= most
        && !policy.max_ttl.is_zero()
        && policy.key_headers.is_sorted()
}
