//! What else a reply depends on: the request headers that its `vary` names, and the key of each variant (RFC 9110,
//! section 12.5.5; RFC 9111, section 4.1).

use crate::key::{Key, put_len, put_part};
use crate::pairs::Pairs;
use sha2::{Digest, Sha256};

/// Changes whenever what a variant's key is made of does.
const VERSION: &[u8] = b"collapser-vary/1";

/// A response that names more headers than this depends on anything.
const MOST_NAMES: usize = 32;

/// The request headers on which a response depends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vary {
    /// None but those that the key has.
    None,
    /// On what no header tells, or on too many: nobody else may be given it.
    All,
    /// These: in lower case, sorted, each once, at most 32.
    Names(Vec<Box<[u8]>>),
}

/// The headers that a response names and the key does not have already, as `keyed` tells of a name in lower case. What
/// cannot be a header's name counts as `*`.
pub fn of(response: Pairs<'_>, keyed: impl Fn(&[u8]) -> bool) -> Vary {
    let mut names: Vec<Box<[u8]>> = Vec::new();
    for name in response.all(b"vary").flat_map(members) {
        if !is_name(name) {
            return Vary::All;
        }
        let name = name.to_ascii_lowercase().into_boxed_slice();
        let Err(place) = names.binary_search(&name) else { continue };
        if keyed(&name) {
            continue;
        }
        if names.len() == MOST_NAMES {
            return Vary::All;
        }
        names.insert(place, name);
    }
    if names.is_empty() { Vary::None } else { Vary::Names(names) }
}

/// Whether a line of `vary` holds `*`, or something that is no header's name.
pub(super) fn is_all(line: &[u8]) -> bool {
    !members(line).all(is_name)
}

/// The members of a list, those that are empty aside (RFC 9110, section 5.6.1.2).
fn members(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|member| !member.is_empty())
}

/// Whether this is a token (RFC 9110, section 5.6.2) other than `*`.
fn is_name(member: &[u8]) -> bool {
    member != b"*"
        && member.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

/// The key of the variant that a request asks for: the primary key, and of each name all values in their order, without
/// the whitespace around them. A header that is absent differs from an empty one.
pub fn variant(primary: &Key, names: &[Box<[u8]>], request: Pairs<'_>) -> Key {
    let mut hash = Sha256::new();
    put_part(&mut hash, VERSION);
    put_part(&mut hash, &primary.0);
    put_len(&mut hash, names.len());
    for name in names {
        put_part(&mut hash, name);
        put_len(&mut hash, request.all(name).count());
        for value in request.all(name) {
            put_part(&mut hash, value.trim_ascii());
        }
    }
    Key(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::pairs::{PairsBuilder, block};
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    fn boxed(names: &[&str]) -> Vec<Box<[u8]>> {
        names.iter().map(|name| name.as_bytes().into()).collect()
    }

    fn vary(lines: &[&str]) -> Vary {
        let lines: Vec<_> = lines.iter().map(|line| ("vary", *line)).collect();
        of(Pairs::parse(&block(&lines)).unwrap(), |name| name == b"keyed")
    }

    #[test]
    fn names_are_lower_case_sorted_and_unique() {
        assert_eq!(vary(&["Foo"]), Vary::Names(boxed(&["foo"])));
        assert_eq!(
            vary(&["foo, Bar ,FOO,, keyed", "", "baz,bar"]),
            Vary::Names(boxed(&["bar", "baz", "foo"]))
        );
        assert_eq!(vary(&["accept-encoding"]), Vary::Names(boxed(&["accept-encoding"])));
    }

    #[test]
    fn what_the_key_has_does_not_count() {
        for lines in [&[][..], &[""], &[" , "], &["Keyed"], &["keyed, KEYED", "keyed"]] {
            assert_eq!(vary(lines), Vary::None, "{lines:?}");
        }
    }

    #[test]
    fn a_star_anywhere_is_everything() {
        for lines in [
            &["*"][..],
            &[" *\t"],
            &["*, *"],
            &["*", "*"],
            &[", *"],
            &["", "*"],
            &["*, Foo"],
            &["Foo, *"],
            &["keyed", "*"],
            // No names of headers.
            &["foo bar"],
            &["\"foo\""],
            &[":path"],
            &["fo\u{f6}"],
        ] {
            assert_eq!(vary(lines), Vary::All, "{lines:?}");
            assert!(lines.iter().any(|line| is_all(line.as_bytes())), "{lines:?}");
        }
    }

    #[test]
    fn so_are_too_many_names() {
        let names = |count: usize| (0..count).map(|n| format!("x{n}")).collect::<Vec<_>>().join(",");
        let twice = format!("{},{},keyed", names(32), names(32));
        assert!(matches!(vary(&[&twice]), Vary::Names(names) if names.len() == 32));
        assert_eq!(vary(&[&names(33)]), Vary::All);
    }

    fn key(names: &[&str], request: &[(&str, &str)]) -> Key {
        variant(&numbered(1), &boxed(names), Pairs::parse(&block(request)).unwrap())
    }

    #[test]
    fn variants_differ_by_the_named_headers_only() {
        let one = key(&["foo"], &[("foo", "1"), ("other", "2")]);
        assert_eq!(one, key(&["foo"], &[("other", "3"), ("foo", "1")]));
        assert_eq!(one, key(&["foo"], &[("foo", " 1\t")]));
        let others = [
            key(&["foo"], &[("foo", "2")]),
            key(&["foo"], &[("foo", "")]),
            key(&["foo"], &[]),
            key(&["foo"], &[("foo", "1"), ("foo", "")]),
            key(&["foo"], &[("foo", "1"), ("foo", "2")]),
            key(&["foo"], &[("foo", "2"), ("foo", "1")]),
            key(&["foo"], &[("foo", "1, 2")]),
            key(&["bar", "foo"], &[("foo", "1")]),
            key(&["bar", "foo"], &[("bar", "1")]),
            key(&["bar"], &[("bar", "1")]),
            key(&[], &[("foo", "1")]),
            variant(&numbered(2), &boxed(&["foo"]), Pairs::parse(&block(&[("foo", "1")])).unwrap()),
            numbered(1),
        ];
        let all: std::collections::HashSet<_> = others.iter().chain([&one]).collect();
        assert_eq!(all.len(), others.len() + 1);
    }

    #[test]
    fn a_variant_is_the_same_on_every_target() {
        let key = key(&["a", "b"], &[("a", "1"), ("a", ""), ("c", "2")]);
        assert_eq!(format!("{key:?}"), GOLDEN);
    }

    /// Worked out from the layout with another SHA-256; if the layout changes, so must [`VERSION`].
    const GOLDEN: &str = "9a3638f1ddc7f033";

    #[test]
    fn no_bytes_panic() {
        runner(2_048)
            .run(&prop::collection::vec(any::<u8>(), 0..64), |line| {
                let mut headers = PairsBuilder::default();
                headers.push(b"vary", &line);
                let block = headers.build();
                let vary = of(Pairs::parse(&block).unwrap(), |_| false);
                prop_assert_eq!(is_all(&line), vary == Vary::All);
                Ok(())
            })
            .unwrap();
    }
}
