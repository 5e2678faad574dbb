//! The Connect service `filesystem.Filesystem`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use connectrpc::{
    ConnectError, Encodable, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream,
};
use space_proto::filesystem::{
    CreateWatcherRequest, CreateWatcherResponse, Filesystem, GetWatcherEventsRequest,
    GetWatcherEventsResponse, ListDirRequest, ListDirResponse, MakeDirRequest, MakeDirResponse, MoveRequest,
    MoveResponse, RemoveRequest, RemoveResponse, RemoveWatcherRequest, RemoveWatcherResponse, StatRequest,
    StatResponse, WatchDirRequest, WatchDirResponse,
};

use crate::account::{Account, Names};
use crate::core::named_user;
use crate::identity::run_as;
use crate::process::{deadline, keepalive};

use super::entry::request_path;
use super::watch::{self, Watch, WatchOptions};
use super::{FileError, Files, tree};

/// The generated trait is implemented for this, so that handlers can hold the state they share.
#[derive(Debug)]
pub(crate) struct Service(pub(crate) Arc<Files>);

impl Service {
    /// Does file work at the place that a request names, as the account it means, with the tables of owners' names at hand.
    async fn at<T: Send + 'static>(
        &self,
        context: &RequestContext,
        (text, raw): (&str, &[u8]),
        work: impl FnOnce(&Path, &Names) -> Result<T, FileError> + Send + 'static,
    ) -> Result<T, ConnectError> {
        let (account, path) = self.locate(context, text, raw)?;
        let etc = self.0.core.config.etc.clone();
        let done = run_as(&account, move || work(&path, &Names::read(&etc))).await;
        let failed = |source| FileError::Internal {
            what: "act as",
            path: account.name.clone(),
            source,
        };
        Ok(done.map_err(failed)??)
    }

    fn locate(
        &self,
        context: &RequestContext,
        text: &str,
        raw: &[u8],
    ) -> Result<(Account, PathBuf), FileError> {
        self.0
            .locate(named_user(context.headers()).as_deref(), request_path(text, raw))
    }

    async fn watch(
        &self,
        context: &RequestContext,
        (text, raw): (&str, &[u8]),
        options: WatchOptions,
    ) -> Result<Watch, FileError> {
        let (account, path) = self.locate(context, text, raw)?;
        let etc = self.0.core.config.etc.clone();
        Watch::open(account, path, options, etc).await
    }
}

impl Filesystem for Service {
    async fn stat<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, StatRequest>,
    ) -> ServiceResult<impl Encodable<StatResponse> + Send + use<'a>> {
        let entry = self
            .at(&context, (request.path, request.raw_path), tree::stat)
            .await?;
        Response::ok(StatResponse {
            entry: entry.into(),
            ..StatResponse::default()
        })
    }

    async fn make_dir<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, MakeDirRequest>,
    ) -> ServiceResult<impl Encodable<MakeDirResponse> + Send + use<'a>> {
        let entry = self
            .at(&context, (request.path, request.raw_path), tree::make)
            .await?;
        Response::ok(MakeDirResponse {
            entry: entry.into(),
            ..MakeDirResponse::default()
        })
    }

    async fn r#move<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, MoveRequest>,
    ) -> ServiceResult<impl Encodable<MoveResponse> + Send + use<'a>> {
        let (_, to) = self.locate(&context, request.destination, request.raw_destination)?;
        let entry = self
            .at(
                &context,
                (request.source, request.raw_source),
                move |from, names| tree::rename(from, &to, names),
            )
            .await?;
        Response::ok(MoveResponse {
            entry: entry.into(),
            ..MoveResponse::default()
        })
    }

    async fn list_dir<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, ListDirRequest>,
    ) -> ServiceResult<impl Encodable<ListDirResponse> + Send + use<'a>> {
        let depth = request.depth;
        let entries = self
            .at(&context, (request.path, request.raw_path), move |path, names| {
                tree::list(path, depth, names)
            })
            .await?;
        Response::ok(ListDirResponse {
            entries,
            ..ListDirResponse::default()
        })
    }

    async fn remove<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, RemoveRequest>,
    ) -> ServiceResult<impl Encodable<RemoveResponse> + Send + use<'a>> {
        self.at(&context, (request.path, request.raw_path), |path, _| {
            tree::remove(path)
        })
        .await?;
        Response::ok(RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        context: RequestContext,
        request: ServiceRequest<'_, WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<WatchDirResponse> + Send + use<>>> {
        let options = WatchOptions {
            recursive: request.recursive,
            include_entry: request.include_entry,
            allow_network_mounts: request.allow_network_mounts,
        };
        let watch = self
            .watch(&context, (request.path, request.raw_path), options)
            .await?;
        Ok(Response::stream(watch::events(
            watch,
            keepalive(&context),
            deadline(&context),
        )))
    }

    async fn create_watcher<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, CreateWatcherRequest>,
    ) -> ServiceResult<impl Encodable<CreateWatcherResponse> + Send + use<'a>> {
        let options = WatchOptions {
            recursive: request.recursive,
            include_entry: request.include_entry,
            allow_network_mounts: request.allow_network_mounts,
        };
        let watch = self
            .watch(&context, (request.path, request.raw_path), options)
            .await?;
        let watcher_id = self.0.watchers.add(watch)?;
        Response::ok(CreateWatcherResponse {
            watcher_id,
            ..CreateWatcherResponse::default()
        })
    }

    async fn get_watcher_events<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, GetWatcherEventsRequest>,
    ) -> ServiceResult<impl Encodable<GetWatcherEventsResponse> + Send + use<'a>> {
        let events = self.0.watchers.take_events(request.watcher_id)?;
        Response::ok(GetWatcherEventsResponse {
            events,
            ..GetWatcherEventsResponse::default()
        })
    }

    async fn remove_watcher<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, RemoveWatcherRequest>,
    ) -> ServiceResult<impl Encodable<RemoveWatcherResponse> + Send + use<'a>> {
        self.0.watchers.remove(request.watcher_id)?;
        Response::ok(RemoveWatcherResponse::default())
    }
}
