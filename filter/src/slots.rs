//! Fixed sets of slots in Envoy's shared data, of which nothing can be deleted.

use crate::host;
use collapser_engine::lease::Shared;

/// The slots of this name, numbered.
pub struct Slots(pub &'static str);

impl Slots {
    fn key(&self, slot: u32) -> String {
        format!("collapser/{}/{slot}", self.0)
    }
}

impl Shared for Slots {
    fn get(&self, slot: u32) -> Option<(Vec<u8>, u32)> {
        host::shared_data(&self.key(slot))
    }

    fn set(&self, slot: u32, value: &[u8], token: u32) -> bool {
        host::set_shared_data(&self.key(slot), value, token).is_ok()
    }
}
