//! The service for programs inside the guest, on its loopback address.

use std::{io, net::Ipv4Addr, sync::Arc, time::Duration};

use axum::Router;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet};

use crate::say;

/// Connections at once; further ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// Pause after a failed accept, which is most likely out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Listens on `port` of 127.0.0.1. Must run on a tokio runtime.
pub async fn listen(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await
}

/// Serves `router` for ever, with HTTP/1 and HTTP/2.
pub async fn serve(listener: TcpListener, router: Router) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        // Never closed, so always granted.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        while connections.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                say!("cannot accept on the loopback service: {error}");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        // Answers are small and each waits for the one before: without this, delayed acknowledgements cost 40 ms.
        drop(stream.set_nodelay(true));
        let service = TowerToHyperService::new(router.clone());
        connections.spawn(async move {
            let server = auto::Builder::new(TokioExecutor::new());
            // A broken connection is its client's matter.
            drop(server.serve_connection(TokioIo::new(stream), service).await);
            drop(place);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

    async fn ask(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(b"GET /health HTTP/1.1\r\nhost: guest\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Clients that connect and say nothing must not keep others out for ever once they are gone.
    #[tokio::test]
    async fn places_are_given_back() {
        let listener = listen(0).await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/health", axum::routing::get(|| async { "well" }));
        let mut server = JoinSet::new();
        server.spawn(serve(listener, router));
        for _ in 0..2 {
            let mut silent = Vec::new();
            for _ in 0..MAX_CONNECTIONS {
                silent.push(TcpStream::connect(address).await.unwrap());
            }
            drop(silent);
            let answer = tokio::time::timeout(Duration::from_secs(20), ask(address))
                .await
                .unwrap();
            assert!(
                answer.starts_with("HTTP/1.1 200") && answer.ends_with("well"),
                "{answer}"
            );
        }
    }
}
