//! Conditional requests: whoever has the reply already is told so instead of being given it again (RFC 9110, section
//! 13).

use super::date;
use crate::pairs::{Pairs, PairsBuilder, same};

/// Whether a request asks for the reply only if the caller does not have it.
pub fn is_conditional(request: Pairs<'_>) -> bool {
    request.iter().any(|(name, _)| same(name, b"if-none-match") || same(name, b"if-modified-since"))
}

/// Whether a request depends on what the backend has, which no recorded reply can answer.
pub fn has_precondition(request: Pairs<'_>) -> bool {
    request.iter().any(|(name, _)| is_precondition(name))
}

/// Whether a header is such a precondition.
pub(super) fn is_precondition(name: &[u8]) -> bool {
    same(name, b"if-match") || same(name, b"if-unmodified-since") || same(name, b"if-range")
}

/// Whether the caller has this reply already (RFC 9110, section 13.2.2). Only a 200 to GET or HEAD can be had; a caller
/// whose validators are malformed is given the reply.
pub fn not_modified(request: Pairs<'_>, response: Pairs<'_>) -> bool {
    let readable = request.first(b":method").is_none_or(|method| matches!(method, b"GET" | b"HEAD"));
    if !readable || response.first(b":status") != Some(b"200") {
        return false;
    }
    if request.first(b"if-none-match").is_some() {
        return is_listed(request, response);
    }
    let date = |headers: Pairs<'_>, name: &[u8]| only(headers, name).and_then(date::parse);
    let had = date(request, b"if-modified-since");
    let modified = match response.first(b"last-modified") {
        Some(_) => date(response, b"last-modified"),
        // When it was made stands in (RFC 9111, section 4.3.2). What was made in the same second may differ.
        None => date(response, b"date").map(|made| made.saturating_add(1)),
    };
    had.zip(modified).is_some_and(|(had, modified)| modified <= had)
}

/// The value of a header that must not be there twice.
fn only<'a>(headers: Pairs<'a>, name: &[u8]) -> Option<&'a [u8]> {
    let mut values = headers.all(name);
    let first = values.next();
    if values.next().is_some() { None } else { first }
}

/// Whether `if-none-match` lists the reply's entity tag by weak comparison (RFC 9110, sections 8.8.3.2 and 13.1.2).
fn is_listed(request: Pairs<'_>, response: Pairs<'_>) -> bool {
    if only(request, b"if-none-match").is_some_and(|value| value.trim_ascii() == b"*") {
        return true;
    }
    let tag = only(response, b"etag").and_then(|value| match entity_tag(value.trim_ascii()) {
        Some((tag, [])) => Some(tag),
        _ => None,
    });
    tag.is_some_and(|tag| request.all(b"if-none-match").any(|list| lists(list, tag)))
}

/// The opaque part of the entity tag at the start of `text`, without its quotes, and what follows.
fn entity_tag(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let quoted = text.strip_prefix(b"W/").unwrap_or(text).strip_prefix(b"\"")?;
    let end = quoted.iter().position(|byte| *byte == b'"')?;
    Some((quoted.get(..end)?, quoted.get(end + 1..)?))
}

/// Whether a list of entity tags holds this one. A tag may hold commas; what is no tag ends at the next one.
fn lists(mut list: &[u8], tag: &[u8]) -> bool {
    while !list.is_empty() {
        let member = list.trim_ascii_start();
        let (listed, rest) = entity_tag(member).map_or((None, member), |(tag, rest)| (Some(tag), rest));
        let rest = rest.trim_ascii_start();
        let whole = rest.is_empty() || rest.starts_with(b",");
        if whole && listed.is_some_and(|listed| same(listed, tag)) {
            return true;
        }
        let comma = rest.iter().position(|byte| *byte == b',').unwrap_or(rest.len());
        list = rest.get(comma + 1..).unwrap_or_default();
    }
    false
}

/// The headers of a 304 in place of this response: without those that describe the content it would have had (RFC 9110,
/// section 15.4.5).
pub fn not_modified_headers(response: Pairs<'_>) -> PairsBuilder {
    let tagged = response.first(b"etag").is_some();
    let mut headers = PairsBuilder::with_capacity(response.len() + 1);
    headers.push(b":status", b"304");
    for (name, value) in response.iter().filter(|(name, _)| !describes_content(name, tagged)) {
        headers.push(name, value);
    }
    headers
}

/// Whether a response header is not for a 304. Where there is an entity tag, the weaker validator is of no use.
fn describes_content(name: &[u8], tagged: bool) -> bool {
    match name {
        b":status" | b"content-length" | b"content-type" | b"content-encoding" | b"content-language" => true,
        b"content-range" | b"content-digest" | b"content-md5" | b"transfer-encoding" | b"trailer" => true,
        b"last-modified" => tagged,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::block;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    const DATE: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    const EARLIER: &str = "Sun, 06 Nov 1994 08:49:36 GMT";
    const LATER: &str = "Sun, 06 Nov 1994 08:49:38 GMT";

    fn has(request: &[(&str, &str)], response: &[(&str, &str)]) -> bool {
        let response: Vec<_> = [(":status", "200")].iter().chain(response).copied().collect();
        let (request, response) = (block(request), block(&response));
        not_modified(Pairs::parse(&request).unwrap(), Pairs::parse(&response).unwrap())
    }

    #[test]
    fn requests_are_told_apart() {
        let of = |name: &str| {
            let block = block(&[(":method", "GET"), (name, "x")]);
            let headers = Pairs::parse(&block).unwrap();
            (is_conditional(headers), has_precondition(headers))
        };
        for name in ["if-none-match", "if-modified-since"] {
            assert_eq!(of(name), (true, false), "{name}");
        }
        for name in ["if-match", "if-unmodified-since", "if-range"] {
            assert_eq!(of(name), (false, true), "{name}");
        }
        assert_eq!(of("range"), (false, false));
    }

    #[test]
    fn entity_tags_compare_weakly() {
        let cases = [
            ("\"abc\"", "\"abc\"", true),
            ("W/\"abc\"", "W/\"abc\"", true),
            ("W/\"abc\"", "\"abc\"", true),
            ("\"abc\"", "W/\"abc\"", true),
            ("\"\"", "\"\"", true),
            ("\"ab\u{fc}\"", "\"ab\u{fc}\"", true),
            ("\"a\\\"", "\"a\\\"", true),
            ("*", "\"abc\"", true),
            (" * ", "\"abc\"", true),
            // Lists.
            ("\"abc\", \"1\", \"2\"", "\"abc\"", true),
            ("\"1\" ,W/\"abc\"\t,\"2\"", "\"abc\"", true),
            ("\"1\",\"2\",,\"abc\"", "\"abc\"", true),
            (" , \"abc\" ", "\"abc\"", true),
            ("\"a,b\", \"c\"", "\"c\"", true),
            ("\"a,b\", \"c\"", "\"a,b\"", true),
            ("\"1, \"abc\"", "\"abc\"", false),
            ("junk, \"abc\"", "\"abc\"", true),
            ("\"1\" junk, \"abc\"", "\"abc\"", true),
            // Others.
            ("\"abd\"", "\"abc\"", false),
            ("\"ABC\"", "\"abc\"", false),
            ("\"1\", \"2\"", "\"abc\"", false),
            ("\"a, \"b\"", "\"b\"", false),
            ("\"x, \"abc\", y\"", "\"abc\"", false),
            // Malformed.
            ("abc", "\"abc\"", false),
            ("abc", "abc", false),
            ("\"abc\"", "abc", false),
            ("\"abc", "\"abc\"", false),
            ("\"abc\"x", "\"abc\"", false),
            ("x\"abc\"", "\"abc\"", false),
            ("w/\"abc\"", "\"abc\"", false),
            ("W\\\"abc\"", "W\\\"abc\"", false),
            ("W\"abc\"", "W\"abc\"", false),
            ("W/ \"abc\"", "\"abc\"", false),
            ("\"abc\"", "\"abc\", \"d\"", false),
            ("*, \"1\"", "\"abc\"", false),
            ("\"*\"", "\"abc\"", false),
            ("", "\"abc\"", false),
        ];
        for (asked, tag, expected) in cases {
            assert_eq!(has(&[("if-none-match", asked)], &[("etag", tag)]), expected, "{asked} {tag}");
        }
    }

    #[test]
    fn all_lines_are_one_list() {
        let lines = [("if-none-match", "\"1\""), ("if-none-match", "\"abc\"")];
        assert!(has(&lines, &[("etag", "\"abc\"")]));
        assert!(!has(&lines, &[("etag", "\"2\"")]));
        assert!(!has(&lines, &[("etag", "\"abc\""), ("etag", "\"1\"")]));
        assert!(!has(&[("if-none-match", "*"), ("if-none-match", "\"1\"")], &[("etag", "\"abc\"")]));
    }

    #[test]
    fn any_reply_is_had_by_who_has_any() {
        assert!(has(&[("if-none-match", "*")], &[]));
        assert!(!has(&[("if-none-match", "\"a\"")], &[]));
    }

    #[test]
    fn dates_compare() {
        let cases = [
            (DATE, DATE, true),
            (LATER, DATE, true),
            (EARLIER, DATE, false),
            ("Sunday, 06-Nov-94 08:49:37 GMT", DATE, true),
            (DATE, "Sun Nov  6 08:49:37 1994", true),
            ("0", DATE, false),
            (DATE, "0", false),
            ("Sun, 06 Nov 1994 08:49:38 UTC", DATE, false),
        ];
        for (asked, modified, expected) in cases {
            let asked = [("if-modified-since", asked)];
            assert_eq!(has(&asked, &[("last-modified", modified)]), expected, "{asked:?} {modified}");
        }
        let twice = [("if-modified-since", LATER), ("if-modified-since", LATER)];
        assert!(!has(&twice, &[("last-modified", DATE)]));
    }

    #[test]
    fn what_does_not_say_when_it_was_modified_was_made_by_then() {
        let made = ("date", DATE);
        for (asked, expected) in [(EARLIER, false), (DATE, false), (LATER, true)] {
            assert_eq!(has(&[("if-modified-since", asked)], &[made]), expected, "{asked}");
        }
        assert!(!has(&[("if-modified-since", LATER)], &[]));
        assert!(!has(&[("if-modified-since", LATER)], &[made, ("last-modified", "0")]));
        assert!(!has(&[("if-modified-since", EARLIER)], &[made, ("last-modified", DATE)]));
    }

    #[test]
    fn the_entity_tag_goes_before_the_date() {
        let reply = [("etag", "\"abc\""), ("last-modified", DATE)];
        assert!(has(&[("if-none-match", "\"abc\""), ("if-modified-since", EARLIER)], &reply));
        assert!(!has(&[("if-modified-since", LATER), ("if-none-match", "\"x\"")], &reply));
        assert!(!has(&[("if-modified-since", LATER), ("if-none-match", "")], &reply));
    }

    #[test]
    fn only_a_200_to_a_reading_request_is_had() {
        for (method, expected) in [("GET", true), ("HEAD", true), ("POST", false), ("get", false)] {
            let request = [(":method", method), ("if-none-match", "*")];
            assert_eq!(has(&request, &[]), expected, "{method}");
        }
        let request = block(&[("if-none-match", "*")]);
        for status in ["203", "204", "404", "304", "500"] {
            let response = block(&[(":status", status), ("etag", "\"abc\"")]);
            let had = not_modified(Pairs::parse(&request).unwrap(), Pairs::parse(&response).unwrap());
            assert!(!had, "{status}");
        }
    }

    #[test]
    fn a_304_keeps_what_is_not_about_the_content() {
        let not_modified = |response: &[(&str, &str)]| {
            let built = not_modified_headers(Pairs::parse(&block(response)).unwrap()).build();
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            Pairs::parse(&built).unwrap().iter().map(|(n, v)| (text(n), text(v))).collect::<Vec<_>>()
        };
        let kept = [
            ("cache-control", "max-age=1"),
            ("content-location", "/a"),
            ("date", DATE),
            ("expires", LATER),
            ("vary", "accept"),
            ("vary", "accept-language"),
            ("x-unknown", ""),
        ];
        let dropped = [
            ("content-length", "5"),
            ("content-type", "text/plain"),
            ("content-encoding", "gzip"),
            ("content-language", "en"),
            ("content-range", "bytes 0-4/5"),
            ("transfer-encoding", "chunked"),
        ];
        let expected = |last: (&str, &str)| {
            let headers: Vec<_> = [(":status", "304")].iter().chain(&kept).chain([&last]).copied().collect();
            headers.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect::<Vec<_>>()
        };
        let (tag, modified) = (("etag", "W/\"a\""), ("last-modified", EARLIER));
        let response: Vec<_> = [(":status", "200")].into_iter().chain(dropped).chain(kept).collect();
        let untagged: Vec<_> = response.iter().copied().chain([modified]).collect();
        assert_eq!(not_modified(&untagged), expected(modified));
        let tagged: Vec<_> = [modified].into_iter().chain(response).chain([tag]).collect();
        assert_eq!(not_modified(&tagged), expected(tag));
    }

    #[test]
    fn a_listed_tag_is_found_and_no_bytes_panic() {
        let tag = prop::collection::vec(prop::sample::select(b"ab,\\ /W\xff".to_vec()), 0..4);
        let junk = prop::collection::vec(prop::sample::select(b"ab,\\ /W".to_vec()), 0..6);
        runner(2_048)
            .run(&(prop::collection::vec(tag, 1..4), junk), |(tags, junk)| {
                let quoted: Vec<_> = tags.iter().map(|tag| [b"\"", &tag[..], b"\""].concat()).collect();
                let list = [&junk[..], b",", &quoted.join(&b", "[..])].concat();
                for tag in &tags {
                    prop_assert!(lists(&list, tag));
                }
                Ok(())
            })
            .unwrap();
        runner(2_048)
            .run(&prop::collection::vec(any::<u8>(), 0..64), |bytes| {
                let mut headers = PairsBuilder::default();
                headers.push(b":status", b"200").push(b"etag", &bytes).push(b"last-modified", &bytes);
                headers.push(b"if-none-match", &bytes).push(b"if-modified-since", &bytes);
                let block = headers.build();
                let headers = Pairs::parse(&block).unwrap();
                let _ = not_modified(headers, headers);
                prop_assert!(!not_modified_headers(headers).is_empty());
                Ok(())
            })
            .unwrap();
    }
}
