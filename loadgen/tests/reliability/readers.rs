//! Large replies, and callers who do not read theirs: memory is bounded, and those who read get theirs.

use std::time::{Duration, Instant};

use collapser_loadgen::proto::ComputeRequest;
use serde_json::json;

use crate::callers::{assert_right, call, clients, clients_with_window, crowd, sized};
use crate::gate::{GateRig, held};
use crate::health::{Peak, assert_unharmed, mib, rss};
use crate::slow::{SlowReader, slow_readers, steady_reader};

const MIB: u32 = 1 << 20;

/// Callers of the reply, stalled ones included.
const WAITERS: usize = 1_000;

/// What a slow reader takes of each answer.
const WINDOW: u32 = 16 * 1024;

/// Slow readers' connections.
const SLOW: usize = 4;

/// Stalled calls that leave room in `max_fanout_bytes` (64 MiB), and such that do not.
const FEW: usize = 40;
const MANY: usize = 100;

/// How far Envoy's memory may grow: four times `max_fanout_bytes`, since Envoy holds a reply as message and as
/// frames while it is written, and then the sockets' and allocators' share. All replies together are 1000 MiB.
const GROWTH: u64 = 300 << 20;

/// The shipped `stream_idle_timeout`, after which Envoy resets a call whose caller does not read, with some
/// time to hand out the rest.
const IDLE: Duration = Duration::from_secs(15);
const REST: Duration = Duration::from_secs(15);

/// The shipped configuration with nothing changed in how long Envoy waits for anybody.
async fn shipped() -> GateRig {
    GateRig::start_with(json!({"cache_duration": "1h"}), |_| ()).await
}

/// Checks that `WAITERS` less `stalled` readers are answered within `limit` while the others stall.
async fn assert_answered(
    rig: &mut GateRig,
    name: &str,
    message: &ComputeRequest,
    stalled: usize,
    limit: Duration,
    begin: impl AsyncFnOnce(&GateRig),
) -> Vec<SlowReader> {
    let (before, peak) = (rss(&rig.sidecar), Peak::watch(&rig.sidecar));
    let slow = slow_readers(rig.sidecar.addr(), SLOW, stalled / SLOW, WINDOW, message).await;
    let clients = clients_with_window(&rig.sidecar.uri(), 8, MIB).await;
    let start = Instant::now();
    let readers = crowd(&clients, WAITERS - stalled, &message.key, message.payload_bytes);
    begin(rig).await;
    assert_right(readers).await;
    let took = start.elapsed();
    println!(
        "slow readers, {name}: {} x 1 MiB read in {:.2} s while {stalled} stall, RSS {:.0} MiB, peak {:.0}, then {:.0} MiB",
        WAITERS - stalled,
        took.as_secs_f64(),
        mib(before),
        mib(peak.bytes()),
        mib(rss(&rig.sidecar)),
    );
    assert!(took < limit, "the readers waited {took:?}");
    let growth = peak.bytes() - before;
    assert!(growth < GROWTH, "RSS grew by {:.0} MiB", mib(growth));
    slow
}

/// A flight whose waiters are all there when it ends.
async fn flight(name: &str, stalled: usize, limit: Duration) -> (GateRig, Vec<SlowReader>) {
    let mut rig = shipped().await;
    let message = sized(&held(1), MIB);
    let slow = assert_answered(&mut rig, name, &message, stalled, limit, async |rig| {
        rig.waiting(WAITERS).await;
        rig.gate.release(1);
    })
    .await;
    (rig, slow)
}

/// The same of a reply that is cached already.
async fn hits(name: &str, stalled: usize, limit: Duration) -> (GateRig, Vec<SlowReader>) {
    let mut rig = shipped().await;
    let message = sized("k", MIB);
    call(clients(&rig.sidecar.uri(), 1).await.remove(0), "k", MIB).await.unwrap();
    let slow = assert_answered(&mut rig, name, &message, stalled, limit, async |_| ()).await;
    (rig, slow)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_few_who_stall_hold_up_no_waiter() {
    let (mut rig, slow) = flight("flight, few stall", FEW, IDLE - Duration::from_secs(3)).await;
    drop(slow);
    assert_unharmed(&mut rig.sidecar, WAITERS as u64).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_few_who_stall_hold_up_no_hit() {
    let (mut rig, slow) = hits("hits, few stall", FEW, IDLE - Duration::from_secs(3)).await;
    drop(slow);
    assert_unharmed(&mut rig.sidecar, WAITERS as u64 + 1).await;
}

/// Envoy gives up on those who stall, all of them, and then the rest is answered.
#[tokio::test(flavor = "multi_thread")]
async fn when_many_stall_waiters_are_answered_once_those_are_given_up() {
    let (mut rig, slow) = flight("flight, many stall", MANY, 2 * IDLE + REST).await;
    assert_given_up(slow, MANY).await;
    assert_unharmed(&mut rig.sidecar, WAITERS as u64).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_many_stall_hits_are_answered_once_those_are_given_up() {
    let (mut rig, slow) = hits("hits, many stall", MANY, 2 * IDLE + REST).await;
    assert_given_up(slow, MANY).await;
    assert_unharmed(&mut rig.sidecar, WAITERS as u64 + 1).await;
}

/// No slow reader's call ends well: Envoy resets each when its time is over.
async fn assert_given_up(slow: Vec<SlowReader>, count: usize) {
    let mut cut_short = 0;
    for reader in slow {
        cut_short += reader.cut_short().await;
    }
    assert_eq!(cut_short, count);
}

/// Windows say how much Envoy may send, not how much of it is read. What a caller grants and then leaves in its socket lies
/// in Envoy's memory; 16 MiB is the most that gRPC implementations grant a connection.
#[tokio::test(flavor = "multi_thread")]
async fn one_who_leaves_its_socket_alone_fills_no_memory() {
    const CALLS: usize = 500;
    let mut rig = shipped().await;
    let message = sized(&held(1), MIB);
    let mut reader = SlowReader::connect_with(rig.sidecar.addr(), 4 * MIB, 16 * MIB).await;
    for _ in 0..CALLS {
        reader.ask(&message).await;
    }
    rig.waiting(CALLS).await;
    let (before, peak) = (rss(&rig.sidecar), Peak::watch(&rig.sidecar));
    reader.freeze();
    rig.gate.release(1);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let growth = peak.bytes() - before;
    println!("unread socket: {CALLS} x 1 MiB, RSS {:.0} MiB, grew by {:.0} MiB", mib(before), mib(growth));
    assert!(growth < GROWTH, "RSS grew by {:.0} MiB", mib(growth));
    drop(reader);
    assert_unharmed(&mut rig.sidecar, CALLS as u64).await;
}

/// Who reads slowly but goes on reading is not one who stalls, however long it takes.
#[tokio::test(flavor = "multi_thread")]
async fn one_who_reads_steadily_gets_all() {
    let mut rig = shipped().await;
    let message = sized("k", 3 * MIB);
    let start = Instant::now();
    let bytes = steady_reader(rig.sidecar.addr(), &message, Duration::from_millis(100)).await;
    let took = start.elapsed();
    println!("steady reader: {bytes:?} bytes in {:.1} s", took.as_secs_f64());
    assert!(bytes.unwrap() > 3 * MIB as usize);
    assert!(took > IDLE, "it took {took:?}, which proves nothing");
    assert_unharmed(&mut rig.sidecar, 1).await;
}
