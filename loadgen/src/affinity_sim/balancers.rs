//! Ways to choose a replica, as Envoy has them, without Envoy.
//!
//! Sources: Envoy docs, "Load balancing"; Eisenbud et al., "Maglev" (NSDI 2016), section 3.4; Mirrokni et al., "Consistent
//! Hashing with Bounded Loads" (2016), of which Envoy takes the bound.

/// Places in Maglev's table: Envoy's default, a prime.
const TABLE: u64 = 65_537;

/// Places on the ring, of all replicas together (`minimum_ring_size`).
const RING: usize = 65_536;

/// An even hash of a number (SplitMix64's finaliser).
pub fn hash(number: u64, seed: u64) -> u64 {
    let mut x =
        number.wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Maglev's table: the replica at each place.
pub struct Maglev(Vec<u64>);

impl Maglev {
    /// Replicas take turns, each with the next free place of its own order, until none is left.
    pub fn new(replicas: &[u64]) -> Self {
        let order = |replica: u64| (hash(replica, 1) % TABLE, hash(replica, 2) % (TABLE - 1) + 1);
        let mut turns: Vec<_> = replicas.iter().map(|replica| (*replica, order(*replica))).collect();
        let mut table = vec![None; TABLE as usize];
        let mut free = table.len();
        'turns: loop {
            for (replica, (at, skip)) in &mut turns {
                while table[*at as usize].is_some() {
                    *at = (*at + *skip) % TABLE;
                }
                table[*at as usize] = Some(*replica);
                free -= 1;
                if free == 0 {
                    break 'turns;
                }
            }
        }
        Self(table.into_iter().flatten().collect())
    }

    /// The home of a key.
    pub fn home(&self, key: u64) -> u64 {
        self.0[(hash(key, 0) % TABLE) as usize]
    }
}

/// Envoy's ring: as many places for each replica as make up the ring's least size.
pub struct Ring(Vec<(u64, u64)>);

impl Ring {
    /// The ring of these replicas.
    pub fn new(replicas: &[u64]) -> Self {
        let each = RING.div_ceil(replicas.len()) as u64;
        let places = |replica: u64| (0..each).map(move |place| (hash(place, replica + 3), replica));
        let mut ring: Vec<_> = replicas.iter().flat_map(|replica| places(*replica)).collect();
        ring.sort_unstable();
        Self(ring)
    }

    /// The home of a key: the next place on the ring.
    pub fn home(&self, key: u64) -> u64 {
        let hash = hash(key, 0);
        self.0[self.0.partition_point(|(place, _)| *place < hash) % self.0.len()].1
    }
}

/// Calls in flight at each replica, numbered from 0, and Envoy's bound on them.
pub struct InFlight {
    calls: Vec<u64>,
    total: u64,
    /// How many times the mean a replica may have, in percent (`hash_balance_factor`); `None` is as many as come.
    factor: Option<u64>,
}

impl InFlight {
    /// None in flight.
    pub fn new(replicas: u64, factor: Option<u64>) -> Self {
        Self { calls: vec![0; replicas as usize], total: 0, factor }
    }

    /// Calls by replica.
    pub fn calls(&self) -> &[u64] {
        &self.calls
    }

    /// Adds a call: to the home of its key, or to the first replica with room in an order of the key's own.
    pub fn add(&mut self, key: u64, home: u64) -> u64 {
        let replicas = self.calls.len() as u64;
        let has_room = |replica: u64| match self.factor {
            None => true,
            Some(factor) => {
                let room = ((self.total + 1) * factor).div_ceil(100).div_ceil(replicas).max(1);
                self.calls[replica as usize] <= room
            }
        };
        // Steps that have no divisor in common with the number of replicas come by all of them.
        let (start, step) = (hash(key, 4) % replicas, coprime(hash(key, 5) % replicas, replicas));
        let others = (0..replicas).map(|n| (start + n * step) % replicas);
        let chosen = std::iter::once(home).chain(others).find(|replica| has_room(*replica)).unwrap_or(home);
        self.calls[chosen as usize] += 1;
        self.total += 1;
        chosen
    }
}

/// The first number from `least` on that has no divisor in common with `number`.
fn coprime(least: u64, number: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (least.max(1)..).find(|step| gcd(*step, number) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn shares(home: impl Fn(u64) -> u64) -> BTreeMap<u64, u64> {
        let mut shares = BTreeMap::new();
        (0..100_000).for_each(|key| *shares.entry(home(key)).or_default() += 1);
        shares
    }

    #[test]
    fn both_spread_keys_evenly() {
        let replicas: Vec<_> = (0..10).collect();
        let (maglev, ring) = (Maglev::new(&replicas), Ring::new(&replicas));
        for shares in [shares(|key| maglev.home(key)), shares(|key| ring.home(key))] {
            assert!(shares.len() == 10 && shares.values().all(|n| (9_000..11_000).contains(n)), "{shares:?}");
        }
    }

    #[test]
    fn maglev_moves_hardly_more_than_the_lost_replicas_keys_and_envoys_ring_twice_as_many() {
        let (all, left): (Vec<_>, Vec<_>) = ((0..10).collect(), (0..9).collect());
        let moved = |before: &dyn Fn(u64) -> u64, after: &dyn Fn(u64) -> u64| {
            (0..100_000).filter(|key| before(*key) != after(*key)).count()
        };
        let (before, after) = (Maglev::new(&all), Maglev::new(&left));
        let maglev = moved(&|key| before.home(key), &|key| after.home(key));
        let (before, after) = (Ring::new(&all), Ring::new(&left));
        let ring = moved(&|key| before.home(key), &|key| after.home(key));
        assert!((9_000..12_500).contains(&maglev), "{maglev}");
        assert!((15_000..21_000).contains(&ring), "{ring}");
    }

    #[test]
    fn a_bound_bounds_one_hot_key() {
        let mut bounded = InFlight::new(10, Some(150));
        for _ in 0..1_000 {
            bounded.add(7, 3);
        }
        assert!(bounded.calls().iter().all(|calls| *calls <= 151), "{:?}", bounded.calls());
        let mut unbounded = InFlight::new(10, None);
        (0..1_000).for_each(|_| assert_eq!(unbounded.add(7, 3), 3));
    }
}
