// Swagger UI over the service's own document. It asks no other host.
"use strict";

SwaggerUIBundle({ url: document.getElementById("reference").dataset.document, dom_id: "#reference", deepLinking: true, validatorUrl: null, docExpansion: "list", defaultModelsExpandDepth: 0 });
