//! Which gRPC methods may collapse.

/// Methods that stream by definition although their request looks like a unary one, or that are not
/// worth a wait. Naming one in the setting overrides this.
const STREAMING: [&str; 3] = [
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// What a pattern may look like, for error messages.
pub const ALLOWED: &str =
    "\"/pkg.Service/Method\", \"/pkg.Service/*\", or one of these after a \"!\" to exclude it";

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Exact(String),
    /// Up to and including the last slash.
    Service(String),
}

impl Pattern {
    fn parse(text: &str) -> Option<Self> {
        let (service, method) = text.strip_prefix('/')?.split_once('/')?;
        let plain = |part: &str| {
            !part.is_empty() && part.bytes().all(|b| b.is_ascii_graphic() && !b"/*!,".contains(&b))
        };
        if !plain(service) || !(method == "*" || plain(method)) {
            return None;
        }
        Some(match method {
            "*" => Self::Service(format!("/{service}/")),
            _ => Self::Exact(text.to_string()),
        })
    }

    fn matches(&self, path: &[u8]) -> bool {
        match self {
            Self::Exact(exact) => path == exact.as_bytes(),
            Self::Service(prefix) => path.starts_with(prefix.as_bytes()),
        }
    }
}

/// A list of patterns. An exclusion wins over an inclusion; without any inclusion, every method is
/// included. The health service's `Watch` and server reflection are excluded unless named exactly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Methods {
    included: Vec<Pattern>,
    excluded: Vec<Pattern>,
}

impl Methods {
    /// Reads a list of patterns.
    ///
    /// # Errors
    /// The first pattern that is none, see [`ALLOWED`].
    pub fn parse<T: AsRef<str>>(patterns: &[T]) -> Result<Self, String> {
        let mut methods = Self::default();
        for text in patterns.iter().map(AsRef::as_ref) {
            let (list, pattern) = match text.strip_prefix('!') {
                Some(pattern) => (&mut methods.excluded, pattern),
                None => (&mut methods.included, text),
            };
            list.push(Pattern::parse(pattern).ok_or_else(|| text.to_string())?);
        }
        Ok(methods)
    }

    /// Whether a call of `path` may collapse.
    pub fn allow(&self, path: &[u8]) -> bool {
        if self.excluded.iter().any(|pattern| pattern.matches(path)) {
            return false;
        }
        if STREAMING.iter().any(|streaming| path == streaming.as_bytes()) {
            return self
                .included
                .iter()
                .any(|p| matches!(p, Pattern::Exact(exact) if path == exact.as_bytes()));
        }
        self.included.is_empty() || self.included.iter().any(|pattern| pattern.matches(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    fn allow(patterns: &[&str], path: &str) -> bool {
        Methods::parse(patterns).unwrap().allow(path.as_bytes())
    }

    #[test]
    fn without_patterns_everything_but_known_streams_may_collapse() {
        assert!(allow(&[], "/a.B/C"));
        assert!(allow(&[], "/grpc.health.v1.Health/Check"));
        assert!(!allow(&[], "/grpc.health.v1.Health/Watch"));
        assert!(!allow(&["/grpc.health.v1.Health/*"], "/grpc.health.v1.Health/Watch"));
        assert!(allow(&["/grpc.health.v1.Health/Watch"], "/grpc.health.v1.Health/Watch"));
    }

    #[test]
    fn inclusions_narrow_and_exclusions_win() {
        let patterns = ["/a.B/*", "!/a.B/Stream", "/x.Y/One"];
        assert!(allow(&patterns, "/a.B/C"));
        assert!(!allow(&patterns, "/a.B/Stream"));
        assert!(allow(&patterns, "/x.Y/One"));
        assert!(!allow(&patterns, "/x.Y/Two"));
        assert!(!allow(&patterns, "/a.BC/D"));
        assert!(!allow(&["!/a.B/*"], "/a.B/C"));
        assert!(allow(&["!/a.B/*"], "/a.C/D"));
    }

    #[test]
    fn what_is_no_pattern_is_named() {
        for bad in [
            "", "!", "a.B/C", "/a.B", "/a.B/", "//C", "/a.B/C*", "/*/C", "/a.B/C/D", "!!/a.B/C", "/a B/C",
            "*",
        ] {
            assert_eq!(Methods::parse(&["/ok.S/*", bad]), Err(bad.to_string()));
        }
    }
}
