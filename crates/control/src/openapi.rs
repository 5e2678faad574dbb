//! The API's description, generated from its handlers.

use utoipa::openapi::{
    Info, OpenApi, OpenApiBuilder,
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
    let components = document.components.get_or_insert_with(Default::default);
    components.security_schemes.insert(
        "key".to_owned(),
        SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-KEY"))).into(),
    );
    document
}
