//! Where the platform is and who asks.

use std::fmt;

use http::{HeaderMap, HeaderValue, Uri};

use crate::ClientError;

/// The one origin of a platform, with an API key.
#[derive(Clone)]
pub struct Endpoint {
    origin: Uri,
    key: HeaderValue,
}

impl Endpoint {
    /// Checks both.
    ///
    /// # Errors
    ///
    /// [`ClientError::BadEndpoint`] if `url` is not `http://HOST[:PORT]`, or `key` cannot stand in a header.
    pub fn new(url: &str, key: &str) -> Result<Self, ClientError> {
        let refuse = |why: &str| ClientError::BadEndpoint {
            given: url.chars().take(200).flat_map(char::escape_default).collect(),
            why: why.to_owned(),
        };
        let origin: Uri = url
            .trim_end_matches('/')
            .parse()
            .map_err(|_| refuse("it is not a URL"))?;
        match origin.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(refuse(
                    "this version speaks plain http only; put a TLS proxy beside the platform and name its http side",
                ));
            }
            _ => return Err(refuse("it must begin with http://")),
        }
        if origin.authority().is_none() || !matches!(origin.path(), "" | "/") || origin.query().is_some() {
            return Err(refuse("it must be http://HOST[:PORT], without a path"));
        }
        let mut key =
            HeaderValue::from_str(key).map_err(|_| refuse("the API key holds characters no key has"))?;
        key.set_sensitive(true);
        Ok(Self { origin, key })
    }

    /// `http://HOST[:PORT]`, without a slash at the end.
    pub fn url(&self) -> String {
        format!("{self}")
    }

    pub(crate) fn uri(&self) -> Uri {
        self.origin.clone()
    }

    pub(crate) fn api_headers(&self) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static("x-api-key"), self.key.clone())])
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.origin.to_string().trim_end_matches('/'))
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_http_origins_are_taken_and_keys_are_hidden() {
        let good = Endpoint::new("http://127.0.0.1:3000/", "e2b_secret").expect("valid");
        assert_eq!(good.url(), "http://127.0.0.1:3000");
        assert!(!format!("{good:?}").contains("secret"));
        for bad in [
            "https://x",
            "x",
            "",
            "http://",
            "http://x/path",
            "http://x?q",
            "ftp://x",
        ] {
            assert!(Endpoint::new(bad, "k").is_err(), "{bad}");
        }
        assert!(Endpoint::new("http://x", "a\nb").is_err());
    }
}
