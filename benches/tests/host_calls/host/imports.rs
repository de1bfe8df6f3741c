//! The functions that the host offers to the module.

use super::wire::Headers;
use super::{Action, CLUSTER, Flight, Host, LocalReply, Message, Part, Stream};
use std::time::Duration;
use wasmtime::{Caller, Linker, Memory, Result, bail, format_err};

const OK: u32 = 0;
const NOT_FOUND: u32 = 1;
const BAD_ARGUMENT: u32 = 2;
const PARSE_FAILURE: u32 = 4;
const EMPTY: u32 = 7;
const CAS_MISMATCH: u32 = 8;

/// The VM, from within a call.
struct Vm<'a>(Caller<'a, Host>);

impl Vm<'_> {
    fn host(&mut self) -> &mut Host {
        self.0.data_mut()
    }

    fn memory(&self) -> Result<Memory> {
        self.0.data().memory.ok_or_else(|| format_err!("the module calls the host before it is there"))
    }

    fn read(&self, at: u32, size: u32) -> Result<Vec<u8>> {
        let mut bytes = vec![0; size as usize];
        self.memory()?.read(&self.0, at as usize, &mut bytes)?;
        Ok(bytes)
    }

    fn text(&self, at: u32, size: u32) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.read(at, size)?).into_owned())
    }

    fn headers(&self, at: u32, size: u32) -> Result<Option<Headers>> {
        Ok(Headers::parse(&self.read(at, size)?))
    }

    fn write(&mut self, at: u32, bytes: &[u8]) -> Result<()> {
        Ok(self.memory()?.write(&mut self.0, at as usize, bytes)?)
    }

    fn write_number(&mut self, at: u32, number: u32) -> Result<()> {
        self.write(at, &number.to_le_bytes())
    }

    /// Copies bytes into memory that the module allocates for them, which enters it once more.
    fn hand_over(&mut self, bytes: &[u8], data: u32, size: u32) -> Result<u32> {
        let mut at = 0;
        if !bytes.is_empty() {
            let Some((name, allocate)) = self.host().allocate.clone() else { bail!("nothing allocates") };
            *self.host().counts.entries.entry(name).or_default() += 1;
            at = allocate.call(&mut self.0, bytes.len() as u32)?;
            self.write(at, bytes)?;
        }
        self.write_number(data, at)?;
        self.write_number(size, bytes.len() as u32)?;
        Ok(OK)
    }

    /// The stream that calls act on.
    fn stream(&mut self) -> Option<&mut Stream> {
        let acting = self.host().acting();
        self.host().streams.get_mut(&acting)
    }

    /// A header map, if there is one before the filter now.
    fn map(&mut self, kind: u32) -> Result<Option<&mut Headers>> {
        let host = self.host();
        let (stream, response) = (host.acting(), host.call_response.as_mut());
        let part = match kind {
            0 => Part::RequestHeaders,
            1 => Part::RequestTrailers,
            2 => Part::ResponseHeaders,
            3 => Part::ResponseTrailers,
            6 => return Ok(response.map(|response| &mut response.headers)),
            7 => return Ok(response.and_then(|response| response.trailers.as_mut())),
            _ => bail!("this host has no header map {kind}"),
        };
        let Some(stream) = host.streams.get_mut(&stream) else { return Ok(None) };
        // The last part of a body without trailers: Envoy makes trailers for whoever sets them.
        let may_add = part == Part::ResponseTrailers
            && stream.end_of_stream
            && stream.within_reach.contains(&Part::ResponseBody);
        if may_add {
            return Ok(Some(stream.response.trailers.get_or_insert_default()));
        }
        if !stream.within_reach.contains(&part) {
            return Ok(None);
        }
        Ok(match part {
            Part::RequestHeaders => Some(&mut stream.request.headers),
            Part::RequestTrailers => stream.request.trailers.as_mut(),
            Part::ResponseHeaders => Some(&mut stream.response.headers),
            Part::ResponseTrailers => stream.response.trailers.as_mut(),
            Part::RequestBody | Part::ResponseBody => None,
        })
    }

    /// A buffer, if there is one before the filter now.
    fn buffer(&mut self, kind: u32) -> Result<Option<&mut Vec<u8>>> {
        let host = self.host();
        let part = match kind {
            0 => Part::RequestBody,
            1 => Part::ResponseBody,
            4 => return Ok(host.call_response.as_mut().map(|response| &mut response.body)),
            6 => return Ok(None),
            7 => return Ok(Some(&mut host.configuration)),
            _ => bail!("this host has no buffer {kind}"),
        };
        let acting = host.acting();
        let Some(stream) = host.streams.get_mut(&acting) else { return Ok(None) };
        if !stream.within_reach.contains(&part) {
            return Ok(None);
        }
        Ok(Some(if kind == 0 { &mut stream.request.body } else { &mut stream.response.body }))
    }
}

/// Defines one function: it is counted, then does its work.
macro_rules! offer {
    ($linker:ident, $module:literal, $name:ident, |$vm:ident $(, $argument:ident: $type:ty)*| $body:block) => {
        $linker.func_wrap(
            $module,
            stringify!($name),
            |caller: Caller<'_, Host> $(, $argument: $type)*| -> Result<u32> {
                #[allow(unused_mut)]
                let mut $vm = Vm(caller);
                $vm.host().count(stringify!($name));
                $body
            },
        )?;
    };
}

/// Defines all that there are.
pub fn define(linker: &mut Linker<Host>) -> Result<()> {
    define_maps_and_buffers(linker)?;
    define_streams_and_calls(linker)?;
    define_the_rest(linker)?;
    define_wasi(linker)
}

fn define_maps_and_buffers(linker: &mut Linker<Host>) -> Result<()> {
    offer!(linker, "env", proxy_get_header_map_pairs, |vm, kind: u32, data: u32, size: u32| {
        let Some(block) = vm.map(kind)?.map(|map| map.serialize()) else { return Ok(NOT_FOUND) };
        vm.hand_over(&block, data, size)
    });
    offer!(linker, "env", proxy_get_header_map_size, |vm, kind: u32, size: u32| {
        let Some(len) = vm.map(kind)?.map(|map| map.serialize().len()) else { return Ok(NOT_FOUND) };
        vm.write_number(size, len as u32)?;
        Ok(OK)
    });
    offer!(linker, "env", proxy_set_header_map_pairs, |vm, kind: u32, data: u32, size: u32| {
        let Some(headers) = vm.headers(data, size)? else { return Ok(PARSE_FAILURE) };
        let Some(map) = vm.map(kind)? else { return Ok(NOT_FOUND) };
        *map = headers;
        Ok(OK)
    });
    offer!(
        linker,
        "env",
        proxy_get_header_map_value,
        |vm, kind: u32, name: u32, name_size: u32, data: u32, size: u32| {
            let name = vm.text(name, name_size)?;
            let value = vm.map(kind)?.and_then(|map| map.first(&name).map(<[u8]>::to_vec));
            let Some(value) = value else { return Ok(NOT_FOUND) };
            vm.hand_over(&value, data, size)
        }
    );
    offer!(
        linker,
        "env",
        proxy_add_header_map_value,
        |vm, kind: u32, name: u32, name_size: u32, value: u32, value_size: u32| {
            let (name, value) = (vm.read(name, name_size)?, vm.read(value, value_size)?);
            let Some(map) = vm.map(kind)? else { return Ok(NOT_FOUND) };
            map.add(&name, &value);
            Ok(OK)
        }
    );
    offer!(
        linker,
        "env",
        proxy_replace_header_map_value,
        |vm, kind: u32, name: u32, name_size: u32, value: u32, value_size: u32| {
            let (name, value) = (vm.read(name, name_size)?, vm.read(value, value_size)?);
            let Some(map) = vm.map(kind)? else { return Ok(NOT_FOUND) };
            map.replace(&name, &value);
            Ok(OK)
        }
    );
    offer!(linker, "env", proxy_remove_header_map_value, |vm, kind: u32, name: u32, name_size: u32| {
        let name = vm.read(name, name_size)?;
        let Some(map) = vm.map(kind)? else { return Ok(NOT_FOUND) };
        map.remove(&name);
        Ok(OK)
    });
    offer!(
        linker,
        "env",
        proxy_get_buffer_bytes,
        |vm, kind: u32, start: u32, max: u32, data: u32, size: u32| {
            let Some(buffer) = vm.buffer(kind)? else { return Ok(NOT_FOUND) };
            let start = (start as usize).min(buffer.len());
            let end = start.saturating_add(max as usize).min(buffer.len());
            let bytes = buffer[start..end].to_vec();
            vm.hand_over(&bytes, data, size)
        }
    );
    offer!(
        linker,
        "env",
        proxy_set_buffer_bytes,
        |vm, kind: u32, start: u32, size: u32, data: u32, data_size: u32| {
            let bytes = vm.read(data, data_size)?;
            let Some(buffer) = vm.buffer(kind)? else { return Ok(NOT_FOUND) };
            match start as usize {
                0 => drop(buffer.splice(..(size as usize).min(buffer.len()), bytes)),
                start if start >= buffer.len() => buffer.extend(bytes),
                _ => return Ok(BAD_ARGUMENT),
            }
            Ok(OK)
        }
    );
    Ok(())
}

fn define_streams_and_calls(linker: &mut Linker<Host>) -> Result<()> {
    offer!(
        linker,
        "env",
        proxy_send_local_response,
        |vm,
         status: u32,
         details: u32,
         details_size: u32,
         body: u32,
         body_size: u32,
         headers: u32,
         headers_size: u32,
         grpc_status: i32| {
            vm.read(details, details_size)?;
            let body = vm.read(body, body_size)?;
            let Some(headers) = vm.headers(headers, headers_size)? else { return Ok(PARSE_FAILURE) };
            let grpc_status = u32::try_from(grpc_status).ok().filter(|status| *status <= 16);
            let stream = vm.host().acting();
            if vm.stream().is_none() {
                return Ok(BAD_ARGUMENT);
            }
            let reply = LocalReply { status, body, headers, grpc_status };
            vm.host().actions.push_back(Action::LocalReply { stream, reply });
            Ok(OK)
        }
    );
    offer!(linker, "env", proxy_continue_stream, |vm, kind: u32| {
        let stream = vm.host().acting();
        match kind {
            0 => vm.host().actions.push_back(Action::ContinueRequest { stream }),
            _ => bail!("this host does not continue streams of kind {kind}"),
        }
        Ok(OK)
    });
    offer!(linker, "env", proxy_set_effective_context, |vm, context: u32| {
        let host = vm.host();
        if context != host.root && !host.streams.contains_key(&context) {
            return Ok(BAD_ARGUMENT);
        }
        host.effective = context;
        Ok(OK)
    });
    offer!(linker, "env", proxy_http_call, |vm,
                                            cluster: u32,
                                            cluster_size: u32,
                                            headers: u32,
                                            headers_size: u32,
                                            body: u32,
                                            body_size: u32,
                                            trailers: u32,
                                            trailers_size: u32,
                                            timeout: u32,
                                            token_at: u32| {
        let cluster = vm.text(cluster, cluster_size)?;
        let body = vm.read(body, body_size)?;
        let trailers = vm.headers(trailers, trailers_size)?;
        let Some(headers) = vm.headers(headers, headers_size)? else { return Ok(PARSE_FAILURE) };
        let complete = [":method", ":path", ":authority"].iter().all(|name| headers.first(name).is_some());
        if cluster != CLUSTER || !complete {
            return Ok(BAD_ARGUMENT);
        }
        let host = vm.host();
        host.next_token += 1;
        let (token, context) = (host.next_token, host.acting());
        let trailers = trailers.filter(|trailers| trailers.len() > 0);
        let request = Message { headers, body, trailers };
        let timeout = Duration::from_millis(timeout.into());
        host.flights.push(Flight { token, context, cluster, request, timeout });
        vm.write_number(token_at, token)?;
        Ok(OK)
    });
    offer!(
        linker,
        "env",
        proxy_call_foreign_function,
        |vm, name: u32, name_size: u32, _argument: u32, _argument_size: u32, data: u32, size: u32| {
            // The routes of this host are all the same, so choosing anew changes nothing.
            match vm.text(name, name_size)?.as_str() {
                "clear_route_cache" => vm.hand_over(&[], data, size),
                _ => Ok(NOT_FOUND),
            }
        }
    );
    Ok(())
}

fn define_the_rest(linker: &mut Linker<Host>) -> Result<()> {
    offer!(linker, "env", proxy_log, |vm, level: u32, text: u32, size: u32| {
        const WARN: u32 = 3;
        let text = vm.text(text, size)?;
        if level >= WARN {
            vm.host().complaints.push(text);
        }
        Ok(OK)
    });
    offer!(linker, "env", proxy_get_log_level, |vm, level: u32| {
        const INFO: u32 = 2;
        vm.write_number(level, INFO)?;
        Ok(OK)
    });
    offer!(linker, "env", proxy_get_current_time_nanoseconds, |vm, at: u32| {
        let now = vm.host().clock;
        vm.write(at, &now.to_le_bytes())?;
        Ok(OK)
    });
    offer!(linker, "env", proxy_set_tick_period_milliseconds, |vm, period: u32| {
        let host = vm.host();
        host.tick_period = u64::from(period) * 1_000_000;
        host.next_tick = (period > 0).then_some(host.clock + host.tick_period);
        Ok(OK)
    });
    offer!(linker, "env", proxy_get_property, |vm, path: u32, path_size: u32, _data: u32, _size: u32| {
        // Nothing here has properties; a filter that holds requests for this one would.
        vm.read(path, path_size)?;
        Ok(NOT_FOUND)
    });
    offer!(linker, "env", proxy_register_shared_queue, |vm, name: u32, size: u32, id: u32| {
        let name = vm.text(name, size)?;
        let queues = &mut vm.host().queues;
        let known = queues.iter().position(|(known, _)| *known == name);
        let index = known.unwrap_or_else(|| {
            queues.push((name, Default::default()));
            queues.len() - 1
        });
        vm.write_number(id, index as u32 + 1)?;
        Ok(OK)
    });
    offer!(linker, "env", proxy_enqueue_shared_queue, |vm, queue: u32, data: u32, size: u32| {
        let message = vm.read(data, size)?;
        let host = vm.host();
        let Some((_, messages)) = host.queues.get_mut((queue as usize).wrapping_sub(1)) else {
            return Ok(NOT_FOUND);
        };
        messages.push_back(message);
        host.wakeups.push_back(queue);
        Ok(OK)
    });
    offer!(linker, "env", proxy_dequeue_shared_queue, |vm, queue: u32, data: u32, size: u32| {
        let Some((_, messages)) = vm.host().queues.get_mut((queue as usize).wrapping_sub(1)) else {
            return Ok(NOT_FOUND);
        };
        match messages.pop_front() {
            Some(message) => vm.hand_over(&message, data, size),
            None => Ok(EMPTY),
        }
    });
    offer!(
        linker,
        "env",
        proxy_get_shared_data,
        |vm, key: u32, key_size: u32, data: u32, size: u32, token_at: u32| {
            let key = vm.read(key, key_size)?;
            let Some((value, token)) = vm.host().shared.get(&key).cloned() else { return Ok(NOT_FOUND) };
            vm.hand_over(&value, data, size)?;
            vm.write_number(token_at, token)?;
            Ok(OK)
        }
    );
    offer!(
        linker,
        "env",
        proxy_set_shared_data,
        |vm, key: u32, key_size: u32, data: u32, size: u32, token: u32| {
            let (key, value) = (vm.read(key, key_size)?, vm.read(data, size)?);
            let (known, is) = vm.host().shared.entry(key).or_insert_with(|| (Vec::new(), 0));
            if token != 0 && token != *is {
                return Ok(CAS_MISMATCH);
            }
            (*known, *is) = (value, *is + 1);
            Ok(OK)
        }
    );
    offer!(linker, "env", proxy_define_metric, |vm, _kind: u32, name: u32, size: u32, id: u32| {
        let name = vm.text(name, size)?;
        let metrics = &mut vm.host().metrics;
        let known = metrics.iter().position(|(known, _)| *known == name);
        let index = known.unwrap_or_else(|| {
            metrics.push((name, 0));
            metrics.len() - 1
        });
        vm.write_number(id, index as u32 + 1)?;
        Ok(OK)
    });
    offer!(linker, "env", proxy_increment_metric, |vm, id: u32, by: i64| {
        let Some((_, value)) = vm.host().metrics.get_mut((id as usize).wrapping_sub(1)) else {
            return Ok(BAD_ARGUMENT);
        };
        *value += by;
        Ok(OK)
    });
    offer!(linker, "env", proxy_record_metric, |vm, id: u32, recorded: u64| {
        let Some((_, value)) = vm.host().metrics.get_mut((id as usize).wrapping_sub(1)) else {
            return Ok(BAD_ARGUMENT);
        };
        *value += recorded as i64;
        Ok(OK)
    });
    Ok(())
}

fn define_wasi(linker: &mut Linker<Host>) -> Result<()> {
    offer!(linker, "wasi_snapshot_preview1", clock_time_get, |vm, _clock: u32, _precision: u64, at: u32| {
        let now = vm.host().clock;
        vm.write(at, &now.to_le_bytes())?;
        Ok(0)
    });
    offer!(linker, "wasi_snapshot_preview1", random_get, |vm, at: u32, size: u32| {
        // The same in every run, so that counts are.
        let bytes: Vec<u8> = (0..size)
            .map(|_| {
                let host = vm.host();
                host.random = host.random.wrapping_mul(37).wrapping_add(101);
                host.random
            })
            .collect();
        vm.write(at, &bytes)?;
        Ok(0)
    });
    // There are no variables: all settings come from the configuration.
    offer!(linker, "wasi_snapshot_preview1", environ_sizes_get, |vm, count: u32, size: u32| {
        vm.write_number(count, 0)?;
        vm.write_number(size, 0)?;
        Ok(0)
    });
    offer!(linker, "wasi_snapshot_preview1", environ_get, |vm, _pointers: u32, _bytes: u32| { Ok(0) });
    offer!(
        linker,
        "wasi_snapshot_preview1",
        fd_write,
        |vm, _file: u32, parts: u32, count: u32, size: u32| {
            let mut text = Vec::new();
            for n in 0..count {
                let part = vm.read(parts + n * 8, 8)?;
                let number =
                    |at: usize| u32::from_le_bytes([part[at], part[at + 1], part[at + 2], part[at + 3]]);
                text.extend(vm.read(number(0), number(4))?);
            }
            vm.write_number(size, text.len() as u32)?;
            vm.host().complaints.push(String::from_utf8_lossy(&text).into_owned());
            Ok(0)
        }
    );
    linker.func_wrap("wasi_snapshot_preview1", "proc_exit", |code: u32| -> Result<()> {
        bail!("the module has exited with code {code}")
    })?;
    Ok(())
}
