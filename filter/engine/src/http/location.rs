//! What else a request changes: the resources that its response names (RFC 9111, section 4.4).

use crate::changes::Resource;
use crate::pairs::Pairs;

/// The headers that name them.
const NAMING: [&[u8]; 2] = [b"location", b"content-location"];

/// The resources that a response names in `location` and `content-location`, one for each at most. Those of another
/// origin than the request's are left out: no backend may have them forgotten.
pub fn named<'a>(request: Pairs<'a>, response: Pairs<'a>) -> impl Iterator<Item = Resource> + use<'a> {
    NAMING.iter().filter_map(move |name| resolve(request, response.first(name)?))
}

/// The resource that a reference stands for in the response to a request, as its clients ask for it (RFC 3986, section
/// 5.2.2).
fn resolve(request: Pairs<'_>, reference: &[u8]) -> Option<Resource> {
    let authority = request.first(b":authority")?;
    let (reference, _) = split_at_any(reference.trim_ascii(), b"#");
    let (scheme, rest) = split_at_any(reference, b":/?");
    let reference = match rest.strip_prefix(b":") {
        // A scheme that is none of HTTP's has another origin, whatever follows.
        Some(rest) if request.first(b":scheme")?.eq_ignore_ascii_case(scheme) => rest.strip_prefix(b"//")?,
        Some(_) => return None,
        None => match reference.strip_prefix(b"//") {
            Some(rest) => rest,
            None => return Some(Resource::of(authority, &within(request.first(b":path")?, reference))),
        },
    };
    let (named, path) = split_at_any(reference, b"/?");
    named.eq_ignore_ascii_case(authority).then(|| Resource::of(authority, &within(b"/", path)))
}

/// The path that a reference without an authority stands for below `base`, both with their queries.
fn within(base: &[u8], reference: &[u8]) -> Vec<u8> {
    let (base, base_query) = split_at_any(base, b"?");
    let (path, query) = split_at_any(reference, b"?");
    let (path, query) = match path {
        [] if query.is_empty() => (base.to_vec(), base_query),
        [] => (base.to_vec(), query),
        [b'/', ..] => (without_dots(path), query),
        _ => {
            let end = base.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
            let folder = base.get(..end).unwrap_or_default();
            (without_dots(&[folder, path].concat()), query)
        }
    };
    [&path, query].concat()
}

/// An absolute path without segments that stand for another one (RFC 3986, section 5.2.4).
fn without_dots(path: &[u8]) -> Vec<u8> {
    let mut kept: Vec<&[u8]> = Vec::new();
    let mut segments = path.split(|byte| *byte == b'/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        match segment {
            b"." => (),
            b".." => drop(kept.pop()),
            _ => {
                kept.push(segment);
                continue;
            }
        }
        if segments.peek().is_none() {
            // What remains is a folder.
            kept.push(b"");
        }
    }
    [b"/", &*kept.join(&b'/')].concat()
}

/// What is before the first of these bytes, and what begins there.
fn split_at_any<'a>(text: &'a [u8], bytes: &[u8]) -> (&'a [u8], &'a [u8]) {
    text.split_at(text.iter().position(|byte| bytes.contains(byte)).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::{PairsBuilder, block};
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    fn of(path: &str, response: &[(&str, &str)]) -> Vec<Resource> {
        let request = [(":scheme", "http"), (":authority", "Shop:80"), (":path", path)];
        let (request, response) = (block(&request), block(response));
        named(Pairs::parse(&request).unwrap(), Pairs::parse(&response).unwrap()).collect()
    }

    #[test]
    fn references_are_resolved() {
        let cases = [
            ("/x", "/x"),
            ("/x?y=/../z", "/x?y=/../z"),
            ("/x#y?z", "/x"),
            (" /x\t", "/x"),
            ("http://Shop:80/x", "/x"),
            ("HTTP://shop:80/x/../y?q", "/y?q"),
            ("http://shop:80", "/"),
            ("http://shop:80?q", "/?q"),
            ("//shop:80/x", "/x"),
            ("x", "/a/x"),
            ("x/y?z", "/a/x/y?z"),
            ("./x:y", "/a/x:y"),
            ("x/http://y", "/a/x/http://y"),
            (".", "/a/"),
            ("..", "/"),
            ("../x", "/x"),
            ("../../../x", "/x"),
            ("x/./y/..", "/a/x/"),
            ("x//y", "/a/x//y"),
            ("?q", "/a/b?q"),
            ("", "/a/b?c/d"),
            ("#x", "/a/b?c/d"),
        ];
        for (reference, path) in cases {
            let expected = vec![Resource::of(b"Shop:80", path.as_bytes())];
            assert_eq!(of("/a/b?c/d", &[("location", reference)]), expected, "{reference}");
        }
    }

    #[test]
    fn other_origins_are_left_out() {
        for reference in [
            "https://Shop:80/x",
            "http://shop/x",
            "http://shop:81/x",
            "http://me@shop:80/x",
            "//other/x",
            "http:/x",
            "http:x",
            "mailto:x",
            ":x",
        ] {
            assert_eq!(of("/a", &[("location", reference)]), [], "{reference}");
        }
    }

    #[test]
    fn both_headers_count_and_no_other() {
        let response = [("content-location", "/x"), ("link", "</z>"), ("location", "/y"), ("location", "/z")];
        let expected = [Resource::of(b"Shop:80", b"/y"), Resource::of(b"Shop:80", b"/x")];
        assert_eq!(of("/a", &response), expected);
        assert_eq!(of("/a", &[]), []);
    }

    #[test]
    fn no_bytes_panic_and_no_dots_remain() {
        let byte = prop::sample::select(b"./?#:ab%\xff".to_vec());
        let text = || prop::collection::vec(byte.clone(), 0..24);
        runner(4_096)
            .run(&(text(), text()), |(path, reference)| {
                let mut headers = PairsBuilder::default();
                headers.push(b":scheme", b"a").push(b":authority", b"b").push(b":path", &path);
                headers.push(b"location", &reference).push(b"content-location", &path);
                let block = headers.build();
                let pairs = Pairs::parse(&block).unwrap();
                prop_assert!(named(pairs, pairs).count() <= 2);
                let path = without_dots(&[b"/", &*reference].concat());
                prop_assert!(path.starts_with(b"/"));
                let is_dots = |segment: &[u8]| matches!(segment, b"." | b"..");
                prop_assert!(!path.split(|byte| *byte == b'/').any(is_dots));
                Ok(())
            })
            .unwrap();
    }
}
