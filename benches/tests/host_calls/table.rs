//! What each kind of request takes, and what for.

/// What a kind of request is expected to take.
pub struct Expected {
    /// The kind of request.
    pub kind: &'static str,
    /// Host calls.
    pub calls: &'static [(&'static str, u64)],
    /// Entries into the VM.
    pub entries: &'static [(&'static str, u64)],
    /// Wasm instructions, about.
    pub fuel: u64,
}

/// What all kinds take.
pub const TABLE: &[Expected] = &[
    Expected {
        kind: "hit",
        calls: &[
            ("clock_time_get", 1), // when it came: for the grace, and whether the reply is fresh
            ("proxy_get_buffer_bytes", 1), // the message, for the key
            ("proxy_get_header_map_pairs", 1), // the headers, for the verdict and the key
            ("proxy_send_local_response", 1), // the answer, with the marker only
            ("proxy_set_buffer_bytes", 1), // the recorded message goes into the body slot
            ("proxy_set_header_map_pairs", 2), // the recorded headers and trailers
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),             // gives back what was charged for the reply
            ("proxy_on_memory_allocate", 2),  // for the headers and the message
            ("proxy_on_request_body", 1),     // decides, and answers
            ("proxy_on_request_headers", 1),  // judges the method, and holds
            ("proxy_on_response_body", 1),    // fills the body slot and adds trailers
            ("proxy_on_response_headers", 1), // puts the recorded headers in place
        ],
        fuel: 18_400,
    },
    Expected {
        kind: "follower",
        calls: &[
            ("clock_time_get", 1), // when it came
            ("proxy_get_buffer_bytes", 1),
            ("proxy_get_header_map_pairs", 1),
            ("proxy_record_metric", 1), // how long it has waited
            ("proxy_send_local_response", 1),
            ("proxy_set_buffer_bytes", 1),
            ("proxy_set_effective_context", 1), // the root answers on its behalf
            ("proxy_set_header_map_pairs", 2),
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),
            ("proxy_on_memory_allocate", 2),
            ("proxy_on_request_body", 1),
            ("proxy_on_request_headers", 1),
            ("proxy_on_response_body", 1),
            ("proxy_on_response_headers", 1),
        ],
        fuel: 19_700,
    },
    Expected {
        kind: "leader",
        calls: &[
            ("clock_time_get", 3),         // when it came, when its flight left, when the reply came
            ("proxy_get_buffer_bytes", 2), // the message, and that of the reply
            ("proxy_get_header_map_pairs", 3), // the headers, and headers and trailers of the reply
            ("proxy_http_call", 1),        // the flight
            ("proxy_record_metric", 1),    // how long the flight took
            ("proxy_send_local_response", 1), // the answer
            ("proxy_set_buffer_bytes", 1), // the recorded message
            ("proxy_set_effective_context", 3), // root for the flight; the waiter for the answer, and back
            ("proxy_set_header_map_pairs", 2), // the recorded headers and trailers
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),
            ("proxy_on_http_call_response", 1), // records the reply and answers the first batch
            ("proxy_on_memory_allocate", 5),    // two for the request, three for the reply
            ("proxy_on_request_body", 1),
            ("proxy_on_request_headers", 1),
            ("proxy_on_response_body", 1),
            ("proxy_on_response_headers", 1),
        ],
        fuel: 53_350,
    },
    Expected {
        // Here, other replies are cached, so its key is looked up; where none is, it needs none.
        kind: "unshared",
        calls: &[
            ("clock_time_get", 2),         // when it came, and when it was over
            ("proxy_get_buffer_bytes", 1), // the message, for the key
            ("proxy_get_header_map_pairs", 1),
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),
            ("proxy_on_memory_allocate", 2),
            ("proxy_on_request_body", 1),
            ("proxy_on_request_headers", 1),
            ("proxy_on_response_body", 1),
            ("proxy_on_response_headers", 1),
        ],
        fuel: 43_000,
    },
    Expected {
        kind: "bypass: not gRPC",
        calls: &[
            ("proxy_call_foreign_function", 1), // has the route chosen anew, by the mark
            ("proxy_get_header_map_pairs", 1),  // the headers, for the verdict
            ("proxy_replace_header_map_value", 1), // the mark of what passes
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),
            ("proxy_on_memory_allocate", 1), // for the headers
            ("proxy_on_request_headers", 1),
            ("proxy_on_response_body", 1), // nothing to do here, for each part
            ("proxy_on_response_headers", 1),
        ],
        fuel: 2_750,
    },
    Expected {
        kind: "bypass: method",
        calls: &[
            ("proxy_call_foreign_function", 1),
            ("proxy_get_header_map_pairs", 1),
            ("proxy_replace_header_map_value", 1),
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),
            ("proxy_on_memory_allocate", 1),
            ("proxy_on_request_body", 1), // nothing to do here, for each part
            ("proxy_on_request_headers", 1),
            ("proxy_on_response_body", 1),
            ("proxy_on_response_headers", 1),
        ],
        fuel: 5_470,
    },
    // Between the first request and the last answer: what batches and ticks add to a leader and 999 followers.
    Expected {
        kind: "burst of 1,000",
        calls: &[
            ("clock_time_get", 1_041), // each batch and each tick looks at the clock once or twice
            ("proxy_dequeue_shared_queue", 54), // two for each wake-up: the message, and that there is no other
            ("proxy_enqueue_shared_queue", 27), // a wake-up for each batch that follows another
            ("proxy_get_buffer_bytes", 1_001),
            ("proxy_get_header_map_pairs", 1_002),
            ("proxy_get_shared_data", 4), // the lease on the gauges, on a tick
            ("proxy_http_call", 1),
            ("proxy_increment_metric", 9), // all counters, on a tick
            ("proxy_record_metric", 1_000),
            ("proxy_send_local_response", 1_000),
            ("proxy_set_buffer_bytes", 1_000),
            ("proxy_set_effective_context", 1_037), // each waiter, and the root after each batch
            ("proxy_set_header_map_pairs", 2_000),
            ("proxy_set_shared_data", 4),
            ("proxy_set_tick_period_milliseconds", 4), // between slices
        ],
        entries: &[
            ("proxy_on_context_create", 1_000),
            ("proxy_on_done", 1_000),
            ("proxy_on_http_call_response", 1),
            ("proxy_on_memory_allocate", 2_007),
            ("proxy_on_queue_ready", 27), // a batch each
            ("proxy_on_request_body", 1_000),
            ("proxy_on_request_headers", 1_000),
            ("proxy_on_response_body", 1_000),
            ("proxy_on_response_headers", 1_000),
            ("proxy_on_tick", 4), // a slice each
        ],
        fuel: 19_320_000,
    },
    Expected {
        kind: "HTTP hit",
        calls: &[
            ("clock_time_get", 1),             // when it came: whether the page is fresh, and how old
            ("proxy_get_header_map_pairs", 1), // the headers, for the verdict and the key
            ("proxy_send_local_response", 1),  // the answer with its body
            ("proxy_set_header_map_pairs", 1), // the recorded headers, and the age
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),
            ("proxy_on_memory_allocate", 1),  // for the headers
            ("proxy_on_request_headers", 1),  // decides, and answers
            ("proxy_on_response_body", 1),    // nothing to do
            ("proxy_on_response_headers", 1), // puts the recorded headers in place
        ],
        fuel: 28_600,
    },
    Expected {
        kind: "HTTP follower",
        calls: &[
            ("clock_time_get", 1),
            ("proxy_get_header_map_pairs", 1),
            ("proxy_record_metric", 1),
            ("proxy_send_local_response", 1),
            ("proxy_set_effective_context", 1), // the root answers on its behalf
            ("proxy_set_header_map_pairs", 1),
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),
            ("proxy_on_memory_allocate", 1),
            ("proxy_on_request_headers", 1),
            ("proxy_on_response_body", 1),
            ("proxy_on_response_headers", 1),
        ],
        fuel: 25_450,
    },
    Expected {
        kind: "HTTP leader",
        calls: &[
            ("clock_time_get", 4), // when it came, when its flight left, when the reply came, and what the date was
            ("proxy_get_buffer_bytes", 1), // the body of the reply
            ("proxy_get_header_map_pairs", 3), // the headers, and headers and trailers of the reply
            ("proxy_http_call", 1), // the flight
            ("proxy_record_metric", 1), // how long the flight took
            ("proxy_send_local_response", 1),
            ("proxy_set_effective_context", 3),
            ("proxy_set_header_map_pairs", 1),
        ],
        entries: &[
            ("proxy_on_context_create", 1),
            ("proxy_on_done", 1),
            ("proxy_on_http_call_response", 1),
            ("proxy_on_memory_allocate", 3),
            ("proxy_on_request_headers", 1),
            ("proxy_on_response_body", 1),
            ("proxy_on_response_headers", 1),
        ],
        fuel: 55_550,
    },
];
