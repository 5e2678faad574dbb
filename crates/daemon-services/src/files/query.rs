//! The query of `/files`, whose values are bytes.

use std::collections::HashMap;

use percent_encoding::percent_decode_str;

use super::FileError;

/// Queries longer than this are refused: a path has 4096 bytes, each at most three here.
const MAX_QUERY: usize = 64 * 1024;

/// Decoded names and values; the first of several with one name counts.
#[derive(Debug, Default)]
pub(crate) struct Query(HashMap<String, Vec<u8>>);

impl Query {
    pub(crate) fn parse(query: Option<&str>) -> Result<Self, FileError> {
        let query = query.unwrap_or_default();
        if query.len() > MAX_QUERY {
            return Err(FileError::Invalid {
                what: "the query is too long".to_owned(),
            });
        }
        let mut values = HashMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let key = String::from_utf8_lossy(&decode(key)).into_owned();
            values.entry(key).or_insert_with(|| decode(value));
        }
        Ok(Self(values))
    }

    pub(crate) fn bytes(&self, key: &str) -> Option<&[u8]> {
        self.0.get(key).map(Vec::as_slice)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        std::str::from_utf8(self.bytes(key)?).ok()
    }

    /// A whole number; absent is none, anything else an error.
    pub(crate) fn number(&self, key: &'static str) -> Result<Option<u64>, FileError> {
        let Some(text) = self.bytes(key) else {
            return Ok(None);
        };
        let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
        let wrong = || FileError::Invalid {
            what: format!("'{key}' must be a whole number"),
        };
        number.map(Some).ok_or_else(wrong)
    }
}

fn decode(text: &str) -> Vec<u8> {
    percent_decode_str(&text.replace('+', " ")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_bytes() {
        let query = Query::parse(Some("path=%2Fa+b%FF%0A&username=user&path=second&n=12&bad=x")).unwrap();
        assert_eq!(query.bytes("path").unwrap(), b"/a b\xff\n");
        assert_eq!(query.text("username"), Some("user"));
        assert_eq!(query.text("path"), None);
        assert_eq!(query.number("n").unwrap(), Some(12));
        assert!(query.number("bad").is_err());
        assert_eq!(query.number("absent").unwrap(), None);
    }
}
