//! The API's description, generated from its handlers.

use utoipa::openapi::{
    Deprecated, Info, OpenApi, OpenApiBuilder,
    security::{ApiKey, ApiKeyValue, SecurityScheme},
};

/// OpenAPI 3.1 of everything that is part of the published contract. Checked in as `docs/openapi.json`.
pub fn document() -> OpenApi {
    let (_, mut document) = crate::api::documented().split_for_parts();
    let frame = OpenApiBuilder::new()
        .info({
            let mut info = Info::new("SPACE", "1");
            info.description = Some(
                "Sandboxes for agents. Paths outside `/v1/` are E2B's, so that its SDKs work unchanged."
                    .to_owned(),
            );
            info
        })
        .build();
    document.info = frame.info;
    for (older, newer) in crate::api::OLDER_PATHS {
        let paths = &mut document.paths.paths;
        let Some(mut call) = paths.get(newer).and_then(|item| item.post.clone()) else {
            continue;
        };
        call.deprecated = Some(Deprecated::True);
        call.operation_id = call.operation_id.map(|id| format!("{id}_v1"));
        paths.entry(older.to_owned()).or_default().post = Some(call);
    }
    let components = document.components.get_or_insert_with(Default::default);
    components.security_schemes.insert(
        "key".to_owned(),
        SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-KEY"))).into(),
    );
    document
}
