//! Dates in headers, from which ages and lifetimes are computed (RFC 9110, section 5.6.7).

const MONTHS: [&[u8]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

const DAYS: [&[u8]; 7] = [b"Mon", b"Tue", b"Wed", b"Thu", b"Fri", b"Sat", b"Sun"];

const LONG_DAYS: [&[u8]; 7] =
    [b"Monday", b"Tuesday", b"Wednesday", b"Thursday", b"Friday", b"Saturday", b"Sunday"];

/// The days of a year before each month, February having 28.
const DAYS_BEFORE: [u64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];

/// The seconds between the Unix epoch and an HTTP-date in one of its three forms: `Sun, 06 Nov 1994 08:49:37 GMT`,
/// `Sunday, 06-Nov-94 08:49:37 GMT` or `Sun Nov  6 08:49:37 1994`.
///
/// Spaces must be right, and the date must exist; case does not count (RFC 9111, section 4.2), and whether the day of
/// the week fits is not looked at. A leap second is the first one of the next minute. Of years with two digits, 70 to 99
/// are of the 20th century, the others of the 21st. Dates before 1970 are `None`.
pub fn parse(value: &[u8]) -> Option<u64> {
    let text = Text(value.trim_ascii());
    let moment = text.fixdate().or_else(|| text.rfc850()).or_else(|| text.asctime());
    moment?.seconds()
}

/// The numbers of a date as they were written.
struct Moment {
    year: u64,
    /// From 0.
    month: usize,
    /// From 1.
    day: u64,
    /// Seconds since midnight.
    time: u64,
}

impl Moment {
    /// Seconds since the epoch; `None` if there is no such day, or it was before.
    fn seconds(&self) -> Option<u64> {
        let leap =
            self.year.is_multiple_of(4) && (!self.year.is_multiple_of(100) || self.year.is_multiple_of(400));
        let before = |month: usize| {
            let days = DAYS_BEFORE.get(month).copied().unwrap_or(365);
            days + u64::from(leap && month > 1)
        };
        let in_month = before(self.month + 1) - before(self.month);
        if self.day == 0 || self.day > in_month {
            return None;
        }
        let years = self.year.checked_sub(1970)?;
        // The leap days of all years before this one.
        let leaps = |year: u64| year / 4 - year / 100 + year / 400;
        let days = years * 365 + leaps(self.year - 1) - leaps(1969) + before(self.month) + self.day - 1;
        Some(days * 86_400 + self.time)
    }
}

/// What is still to be read.
#[derive(Clone, Copy)]
struct Text<'a>(&'a [u8]);

impl Text<'_> {
    /// `Sun, 06 Nov 1994 08:49:37 GMT`
    fn fixdate(mut self) -> Option<Moment> {
        self.one_of(&DAYS)?;
        self.literal(b", ")?;
        let day = self.number(2)?;
        self.literal(b" ")?;
        let month = self.one_of(&MONTHS)?;
        self.literal(b" ")?;
        let year = self.number(4)?;
        self.literal(b" ")?;
        let time = self.time()?;
        self.literal(b" GMT")?;
        self.end(Moment { year, month, day, time })
    }

    /// `Sunday, 06-Nov-94 08:49:37 GMT`
    fn rfc850(mut self) -> Option<Moment> {
        self.one_of(&LONG_DAYS)?;
        self.literal(b", ")?;
        let day = self.number(2)?;
        self.literal(b"-")?;
        let month = self.one_of(&MONTHS)?;
        self.literal(b"-")?;
        let year = self.number(2)?;
        let year = if year < 70 { 2000 + year } else { 1900 + year };
        self.literal(b" ")?;
        let time = self.time()?;
        self.literal(b" GMT")?;
        self.end(Moment { year, month, day, time })
    }

    /// `Sun Nov  6 08:49:37 1994`
    fn asctime(mut self) -> Option<Moment> {
        self.one_of(&DAYS)?;
        self.literal(b" ")?;
        let month = self.one_of(&MONTHS)?;
        self.literal(b" ")?;
        let digits = if self.literal(b" ").is_some() { 1 } else { 2 };
        let day = self.number(digits)?;
        self.literal(b" ")?;
        let time = self.time()?;
        self.literal(b" ")?;
        let year = self.number(4)?;
        self.end(Moment { year, month, day, time })
    }

    /// `08:49:37`, in seconds.
    fn time(&mut self) -> Option<u64> {
        let hour = self.number(2).filter(|hour| *hour < 24)?;
        self.literal(b":")?;
        let minute = self.number(2).filter(|minute| *minute < 60)?;
        self.literal(b":")?;
        let second = self.number(2).filter(|second| *second <= 60)?;
        Some((hour * 60 + minute) * 60 + second)
    }

    fn literal(&mut self, expected: &[u8]) -> Option<()> {
        let (start, rest) = self.0.split_at_checked(expected.len())?;
        start.eq_ignore_ascii_case(expected).then(|| self.0 = rest)
    }

    /// The position of the name that comes next.
    fn one_of(&mut self, names: &[&[u8]]) -> Option<usize> {
        names.iter().position(|name| self.literal(name).is_some())
    }

    /// A number of so many digits.
    fn number(&mut self, digits: usize) -> Option<u64> {
        let (number, rest) = self.0.split_at_checked(digits)?;
        self.0 = rest;
        let add = |sum: u64, byte: &u8| byte.is_ascii_digit().then(|| sum * 10 + u64::from(byte - b'0'));
        number.iter().try_fold(0, add)
    }

    /// The moment, if nothing follows.
    fn end(self, moment: Moment) -> Option<Moment> {
        self.0.is_empty().then_some(moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    #[test]
    fn reads_the_three_forms() {
        let cases = [
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Sunday, 06-Nov-94 08:49:37 GMT", 784_111_777),
            ("Sun Nov  6 08:49:37 1994", 784_111_777),
            ("Wed Nov 16 08:49:37 1994", 784_975_777),
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Thu Jan  1 00:00:00 1970", 0),
            ("Thu, 18 Aug 2050 02:01:18 GMT", 2_544_400_878),
            ("Fri, 31 Dec 9999 23:59:59 GMT", 253_402_300_799),
            ("Tue, 29 Feb 2000 00:00:00 GMT", 951_782_400),
            ("Sat, 31 Dec 2016 23:59:60 GMT", 1_483_228_800),
            (" Thu, 01 Jan 1970 00:00:01 GMT\t", 1),
            // The wrong day of the week.
            ("Mon, 01 Jan 1970 00:00:00 GMT", 0),
            // Another case.
            ("THU, 01 jAN 1970 00:00:01 gmt", 1),
            ("thursday, 01-JAN-70 00:00:01 Gmt", 1),
            ("THU JAN  1 00:00:01 1970", 1),
            // Two digits.
            ("Thursday, 01-Jan-70 00:00:00 GMT", 0),
            ("Friday, 31-Dec-99 23:59:59 GMT", 946_684_799),
            ("Saturday, 01-Jan-00 00:00:00 GMT", 946_684_800),
            ("Tuesday, 31-Dec-69 23:59:59 GMT", 3_155_759_999),
        ];
        for (text, seconds) in cases {
            assert_eq!(parse(text.as_bytes()), Some(seconds), "{text}");
        }
    }

    #[test]
    fn refuses_the_rest() {
        for text in [
            "",
            "0",
            "-1",
            "foo",
            "784111777",
            "1994-11-06T08:49:37Z",
            "Thu, 18 Aug 2050 02:01:18 UTC",
            "Thu, 18 Aug 2050 02:01:18 AEST",
            "Thu, 18 Aug 2050 02:01:18 +0000",
            "Thu, 18 Aug 2050 02:01:18",
            "Thu, 18 Aug 2050 02:01:18 GMT+1",
            "Thu, 18 Aug 50 02:01:18 GMT",
            "Thu 18 Aug 2050 02:01:18 GMT",
            "Thu, 18  Aug  2050 02:01:18 GMT",
            "Thu, 18-Aug-2050 02:01:18 GMT",
            "Thu, 18-Aug-50 02:01:18 GMT",
            "Thursday, 18 Aug 2050 02:01:18 GMT",
            "Thu, 18 Aug 2050 02.01.18 GMT",
            "Thu, 18 Aug 2050 2:01:18 GMT",
            "Thu, 8 Aug 2050 02:01:18 GMT",
            "Thu,  8 Aug 2050 02:01:18 GMT",
            "Thu, 18 Aug 2050 24:00:00 GMT",
            "Thu, 18 Aug 2050 02:60:18 GMT",
            "Thu, 18 Aug 2050 02:01:61 GMT",
            "Thu, 00 Aug 2050 02:01:18 GMT",
            "Thu, 32 Aug 2050 02:01:18 GMT",
            "Thu, 31 Apr 2050 02:01:18 GMT",
            "Wed, 29 Feb 2023 00:00:00 GMT",
            "Mon, 29 Feb 2100 00:00:00 GMT",
            "Wed, 31 Dec 1969 23:59:59 GMT",
            "Sat, 01 Jan 0000 00:00:00 GMT",
            "Sun, +6 Nov 1994 08:49:37 GMT",
            "Sun Nov 6 08:49:37 1994",
            "Sun Nov 06 08:49:37 1994 GMT",
            "Sun, 06 Nov 1994 08:49:37 GMT, Sun, 06 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text:?}");
        }
    }

    /// The date so many days after the epoch, found by counting: year, month from 0, day from 1.
    fn counted(mut days: u64) -> (u64, usize, u64) {
        let divides = |by: u64, year: u64| year.is_multiple_of(by);
        let leap = |year| (divides(4, year) && !divides(100, year)) || divides(400, year);
        let mut year = 1970;
        while days >= if leap(year) { 366 } else { 365 } {
            days -= if leap(year) { 366 } else { 365 };
            year += 1;
        }
        let february = if leap(year) { 29 } else { 28 };
        let mut month = 0;
        for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            if days < length {
                break;
            }
            days -= length;
            month += 1;
        }
        (year, month, days + 1)
    }

    #[test]
    fn every_date_is_where_a_calendar_has_it() {
        let text = |name: &[u8]| String::from_utf8(name.to_vec()).unwrap();
        runner(2_048)
            .run(&(0..253_402_300_800_u64), |seconds| {
                let days = seconds / 86_400;
                let (year, month, day) = counted(days);
                // The epoch was a Thursday.
                let weekday = ((days + 3) % 7) as usize;
                let (short, long) = (text(DAYS[weekday]), text(LONG_DAYS[weekday]));
                let month = text(MONTHS[month]);
                let time =
                    format!("{:02}:{:02}:{:02}", seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
                let fixdate = format!("{short}, {day:02} {month} {year:04} {time} GMT");
                prop_assert_eq!(parse(fixdate.as_bytes()), Some(seconds), "{}", fixdate);
                let asctime = format!("{short} {month} {day:2} {time} {year:04}");
                prop_assert_eq!(parse(asctime.as_bytes()), Some(seconds), "{}", asctime);
                let rfc850 = format!("{long}, {day:02}-{month}-{:02} {time} GMT", year % 100);
                let read = parse(rfc850.as_bytes());
                if year < 2070 {
                    prop_assert_eq!(read, Some(seconds), "{}", rfc850);
                } else {
                    prop_assert!(read.is_none_or(|read| read < 3_155_760_000), "{}", rfc850);
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn no_bytes_panic() {
        runner(2_048)
            .run(&prop::collection::vec(any::<u8>(), 0..40), |bytes| {
                let _ = parse(&bytes);
                Ok(())
            })
            .unwrap();
        runner(2_048)
            .run(&(0..29_usize, any::<u8>()), |(at, byte)| {
                let mut bytes = *b"Sun, 06 Nov 1994 08:49:37 GMT";
                bytes[at] = byte;
                prop_assert!(parse(&bytes).is_none_or(|seconds| seconds < 253_402_300_801));
                Ok(())
            })
            .unwrap();
    }
}
