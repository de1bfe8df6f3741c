//! Chance, for what only needs to be spread: jitter and early refreshes. Nobody gains anything by guessing it.

/// A source of numbers (xorshift64*, Marsaglia and Vigna).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A source that differs from VM to VM where the target has entropy.
    pub fn seeded() -> Self {
        use std::hash::{BuildHasher, Hasher};
        Self(std::hash::RandomState::new().build_hasher().finish() | 1)
    }

    /// The next number above 0 and up to 1.
    pub fn unit(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
        (bits + 1) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn numbers_are_spread_over_the_unit() {
        let mut random = Random::seeded();
        let numbers: Vec<f64> = std::iter::repeat_with(|| random.unit()).take(10_000).collect();
        assert!(numbers.iter().all(|number| *number > 0.0 && *number <= 1.0));
        let mean = numbers.iter().sum::<f64>() / 10_000.0;
        assert!((0.45..0.55).contains(&mean), "{mean}");
    }
}
