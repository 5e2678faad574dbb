//! A bound on the input for programs that is held in memory at one time, over all requests.
//!
//! A message is held several times over while it is decoded, and until the program has read it, which may be never. So
//! large ones need a share of one budget before they are read; who gets none in time is refused and has lost nothing.
//!
//! Calls with one message are charged by their length. A stream is charged by the message: what is between two of them
//! is the five bytes that say how long the next is.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};
use http_body::Frame;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Messages up to this length are not charged: as many as there can be streams are small beside the budget.
const SMALL: u64 = 64 * 1024;
/// Bytes per share.
const UNIT: u64 = 1024;
/// How long a message waits for its share. A program that reads its input gives it back sooner.
const PATIENCE: Duration = Duration::from_secs(5);
/// Flags and length before each message of a stream.
const PREFIX: usize = 5;
/// In the flags: the message is compressed, so its length says little.
const COMPRESSED: u8 = 1;

const REFUSED: &str =
    "too much input waits for programs that do not read it; send it again later, or in pieces";

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    shares: Arc<Semaphore>,
    most: u64,
}

impl Budget {
    /// A budget of so many bytes, which must suffice for the largest message that is taken at all.
    pub(crate) fn new(bytes: usize) -> Self {
        let most = (bytes as u64).div_ceil(UNIT);
        Self {
            shares: Arc::new(Semaphore::new(usize::try_from(most).unwrap_or(usize::MAX))),
            most,
        }
    }

    /// `None`: not within the time that a message waits.
    async fn share(self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        // One that is too large altogether is refused by its reader, when it has seen as much.
        let shares = u32::try_from(bytes.div_ceil(UNIT).min(self.most)).unwrap_or(u32::MAX);
        timeout(PATIENCE, self.shares.acquire_many_owned(shares))
            .await
            .ok()?
            .ok()
    }

    /// Serves a call to the process service within the budget.
    pub(crate) async fn serve(self, request: Request, next: Next) -> Response {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        match method {
            "SendInput" | "Start" => {
                let length = length(request.headers()).unwrap_or(u64::MAX);
                if length <= SMALL {
                    return next.run(request).await;
                }
                match self.share(length).await {
                    Some(_held) => next.run(request).await,
                    None => refuse(),
                }
            }
            "StreamInput" => {
                next.run(request.map(|body| Body::new(Metered::new(body, self))))
                    .await
            }
            _ => next.run(request).await,
        }
    }
}

fn length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn refuse() -> Response {
    let body = serde_json::json!({ "code": "resource_exhausted", "message": REFUSED });
    (StatusCode::TOO_MANY_REQUESTS, axum::Json(body)).into_response()
}

type Sharing = Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send>>;

/// The body of a stream of messages, let through within the budget.
struct Metered {
    body: Body,
    budget: Budget,
    prefix: [u8; PREFIX],
    /// Bytes of the prefix seen so far.
    seen: usize,
    /// Bytes of the current message to come.
    left: u64,
    held: Vec<OwnedSemaphorePermit>,
    /// A piece that waits for its messages' share.
    waiting: Option<(Bytes, Sharing)>,
}

impl Metered {
    fn new(body: Body, budget: Budget) -> Self {
        Self {
            body,
            budget,
            prefix: [0; PREFIX],
            seen: 0,
            left: 0,
            held: Vec::new(),
            waiting: None,
        }
    }

    /// Follows the messages through a piece; returns what those that begin in it are charged.
    fn follow(&mut self, mut piece: &[u8]) -> u64 {
        let mut charge = 0;
        while !piece.is_empty() {
            if self.left > 0 {
                let skipped = self.left.min(piece.len() as u64);
                self.left -= skipped;
                piece = piece
                    .get(usize::try_from(skipped).unwrap_or(usize::MAX)..)
                    .unwrap_or_default();
                continue;
            }
            let (first, rest) = piece.split_at((PREFIX - self.seen).min(piece.len()));
            self.prefix[self.seen..self.seen + first.len()].copy_from_slice(first);
            self.seen += first.len();
            piece = rest;
            if self.seen == PREFIX {
                let [flags, length @ ..] = self.prefix;
                self.left = u32::from_be_bytes(length).into();
                self.seen = 0;
                if flags & COMPRESSED != 0 {
                    charge += self.budget.most * UNIT;
                } else if self.left > SMALL {
                    charge += self.left;
                }
            }
        }
        charge
    }
}

impl HttpBody for Metered {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if let Some((piece, sharing)) = &mut this.waiting {
            let share = ready!(sharing.as_mut().poll(cx));
            let piece = std::mem::take(piece);
            this.waiting = None;
            return Poll::Ready(Some(match share {
                Some(share) => {
                    this.held.push(share);
                    Ok(Frame::data(piece))
                }
                None => Err(axum::Error::new(std::io::Error::other(REFUSED))),
            }));
        }
        if this.left == 0 && this.seen == 0 {
            // Whoever asks for the next message is done with the last.
            this.held.clear();
        }
        let Some(frame) = ready!(Pin::new(&mut this.body).poll_frame(cx)) else {
            return Poll::Ready(None);
        };
        let piece = match frame?.into_data() {
            Ok(piece) => piece,
            Err(other) => return Poll::Ready(Some(Ok(other))),
        };
        match this.follow(&piece) {
            0 => Poll::Ready(Some(Ok(Frame::data(piece)))),
            charge => {
                this.waiting = Some((piece, Box::pin(this.budget.clone().share(charge))));
                self.poll_frame(cx)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(flags: u8, length: usize) -> Vec<u8> {
        let mut bytes = vec![flags];
        bytes.extend_from_slice(&u32::try_from(length).unwrap().to_be_bytes());
        bytes.resize(PREFIX + length, 7);
        bytes
    }

    #[test]
    fn messages_are_charged_by_their_length_however_they_are_cut() {
        let large = usize::try_from(SMALL).unwrap() + 1;
        let stream = [
            message(0, 10),
            message(0, large),
            message(0, 0),
            message(1, 3),
            message(0, large),
        ]
        .concat();
        let expected = 2 * large as u64 + 1024 * UNIT;
        for piece in [1, 4, 5, 6, 1000, stream.len()] {
            let mut metered = Metered::new(Body::empty(), Budget::new(1 << 20));
            let charged: u64 = stream.chunks(piece).map(|piece| metered.follow(piece)).sum();
            assert_eq!(
                (charged, metered.left, metered.seen),
                (expected, 0, 0),
                "pieces of {piece}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_gets_no_share_is_refused_and_what_waits_gets_it_when_another_ends() {
        let budget = Budget::new(1 << 20);
        let all = budget.clone().share(u64::MAX).await.unwrap();
        assert!(budget.clone().share(SMALL + 1).await.is_none());
        let waiting = tokio::spawn(budget.share(SMALL + 1));
        drop(all);
        assert!(waiting.await.unwrap().is_some());
    }
}
