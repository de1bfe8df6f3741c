//! Sizes as people write them: `4MiB`, `256KiB`, `1000`.

/// What a size may look like, for error messages.
pub const ALLOWED: &str = "a number of bytes such as 262144, or \"256KiB\", \"4MiB\", \"1GiB\"";

/// Parses a size in bytes; `None` if it is none or does not fit 64 bits.
pub fn parse(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn reads_binary_units_and_nothing_else() {
        let good = [
            ("0", 0),
            ("17", 17),
            ("17B", 17),
            ("256KiB", 262_144),
            ("4MiB", 4_194_304),
            ("2GiB", 2_147_483_648),
        ];
        for (text, bytes) in good {
            assert_eq!(parse(text), Some(bytes), "{text}");
        }
        for text in
            ["", "MiB", "-1", "1.5MiB", "1MB", "1 MiB", "99999999999999999999", "18446744073709551615KiB"]
        {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
