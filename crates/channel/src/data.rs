//! The start of a session on the data port, and a stream that begins with bytes already read.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use crate::{ChannelError, Nonce, NonceSearch};

/// Bytes read at once while looking for the nonce.
const CHUNK: usize = 16 * 1024;

/// Opens a data session on the host's end of the data port: writes `nonce`, then discards input up to the guest's.
///
/// `nonce` is that of the control connection ([`crate::HostControl::nonce`]), whose hello must have been answered.
/// Returns the stream ready for HTTP/2 with prior knowledge. `limit` bounds the whole wait; how many stale bytes come
/// first is bounded only by it. Not cancellation safe: after a failure open the port again.
pub async fn open_data<S>(mut stream: S, nonce: &Nonce, limit: Duration) -> Result<Prefixed<S>, ChannelError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let what = "the data port's nonce";
    let exchange = async {
        let failed = |step| move |source| ChannelError::Io { step, source };
        stream
            .write_all(nonce.as_bytes())
            .await
            .map_err(failed("write the nonce to the data port"))?;
        stream
            .flush()
            .await
            .map_err(failed("write the nonce to the data port"))?;
        let mut search = NonceSearch::new(nonce);
        let mut buffer = BytesMut::with_capacity(CHUNK);
        loop {
            buffer.clear();
            let read = stream
                .read_buf(&mut buffer)
                .await
                .map_err(failed("read the data port"))?;
            if read == 0 {
                return Err(ChannelError::Closed { what });
            }
            if let Some(end) = search.feed(&buffer) {
                buffer.advance(end);
                return Ok(buffer.freeze());
            }
        }
    };
    let prefix = tokio::time::timeout(limit, exchange)
        .await
        .map_err(|_| ChannelError::TimedOut { what, limit })??;
    Ok(Prefixed::new(prefix, stream))
}

/// A stream with bytes that were read from it put back in front.
#[derive(Debug)]
pub struct Prefixed<S> {
    prefix: Bytes,
    stream: S,
}

impl<S> Prefixed<S> {
    /// `prefix` is read first, then `stream`.
    pub fn new(prefix: Bytes, stream: S) -> Self {
        Self { prefix, stream }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let length = self.prefix.len().min(buf.remaining());
        buf.put_slice(&self.prefix.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
