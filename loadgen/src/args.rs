//! What both programs read from flags and environment: durations and metadata,
//! with errors that say what is expected.

use std::time::Duration;

use bytes::Bytes;
use collapser_engine::duration;
use tonic::metadata::{
    AsciiMetadataKey, AsciiMetadataValue, BinaryMetadataKey, BinaryMetadataValue, MetadataMap,
};

use crate::proto::Metadata;

/// Reads a duration as the settings have them.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    duration::parse(text.trim()).ok_or_else(|| format!("`{text}` is none; write {}", duration::ALLOWED))
}

/// Reads `name=value`. For a name that ends in `-bin` the value's bytes become
/// the binary value; base64 is what travels, not what is written here.
pub fn parse_metadata(text: &str) -> Result<Metadata, String> {
    let (name, value) =
        text.split_once('=').ok_or_else(|| format!("`{text}` is not metadata; write name=value"))?;
    let name = name.trim().to_ascii_lowercase();
    let entry = if name.ends_with("-bin") {
        Metadata { name, binary_value: Bytes::copy_from_slice(value.as_bytes()), ..Metadata::default() }
    } else {
        Metadata { name, value: value.to_owned(), ..Metadata::default() }
    };
    append_metadata(&mut MetadataMap::new(), &entry)?;
    Ok(entry)
}

/// Builds a metadata map. A repeated name keeps all its values, in order.
pub fn metadata_map(entries: &[Metadata]) -> Result<MetadataMap, String> {
    let mut map = MetadataMap::with_capacity(entries.len());
    for entry in entries {
        append_metadata(&mut map, entry)?;
    }
    Ok(map)
}

/// Adds one entry to `map`, behind what it holds under that name already.
pub fn append_metadata(map: &mut MetadataMap, entry: &Metadata) -> Result<(), String> {
    let name = &entry.name;
    let bad_name = |_| format!("`{name}` is not a metadata name: lower-case letters, digits, -_.");
    if name.ends_with("-bin") {
        let key = BinaryMetadataKey::from_bytes(name.as_bytes()).map_err(bad_name)?;
        map.append_bin(key, BinaryMetadataValue::from_bytes(&entry.binary_value));
    } else {
        let key = AsciiMetadataKey::from_bytes(name.as_bytes()).map_err(bad_name)?;
        let value = AsciiMetadataValue::try_from(entry.value.as_str())
            .map_err(|_| format!("the value of `{name}` holds more than printable ASCII"))?;
        map.append(key, value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_in_every_unit() {
        for (text, nanos) in [
            ("100us", 100_000),
            ("50ms", 50_000_000),
            ("1.5s", 1_500_000_000),
            ("2m", 120_000_000_000),
            ("0", 0),
            (" 10s ", 10_000_000_000),
            ("1m30s", 90_000_000_000),
            ("1h", 3_600_000_000_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(nanos)));
        }
    }

    #[test]
    fn durations_that_are_none() {
        for text in ["", "s", "10", "-1s", "1x", "1.2.3s", "1s2", "ms50"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert!(parse_duration("10").unwrap_err().contains("units"));
        assert!(parse_duration("99999999999999m").is_err());
    }

    #[test]
    fn metadata_with_text_and_bytes() {
        let entry = parse_metadata("X-Trace = a=b").unwrap();
        assert_eq!((entry.name.as_str(), entry.value.as_str()), ("x-trace", " a=b"));
        let entry = parse_metadata("x-bin=abc").unwrap();
        assert_eq!(entry.binary_value, "abc");
        assert!(entry.value.is_empty());
    }

    #[test]
    fn metadata_that_is_none() {
        for text in ["", "novalue", "=x", "a b=c", "naïve=x", "a=line\nbreak"] {
            assert!(parse_metadata(text).is_err(), "{text}");
        }
    }

    #[test]
    fn repeated_names_keep_their_order() {
        let entries = ["a=1", "b-bin=x", "a=2"].map(|text| parse_metadata(text).unwrap());
        let map = metadata_map(&entries).unwrap();
        let values: Vec<_> = map.get_all("a").iter().collect();
        assert_eq!(values, ["1", "2"]);
        assert_eq!(map.get_bin("b-bin").unwrap().to_bytes().unwrap(), "x");
    }
}
