//! What HTTP's own rules say about sharing one reply: RFC 9111 (caching), RFC 5861 (stale replies) and RFC 9110
//! (conditional requests), as a shared cache has to read them. There is no heuristic freshness.
//!
//! Where a header is malformed or says two things, it is read so that less is shared.

pub mod conditional;
pub mod date;
pub mod directives;
pub mod freshness;
pub mod location;
pub mod request;
pub mod vary;
