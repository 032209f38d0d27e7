// Swagger UI over the service's own document. It asks no other host.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow_scheme = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow_scheme);
follow_scheme();
// Whatever scrolls can be reached by the keyboard.
const reference = document.getElementById("reference");
const reach = () => { for (const part of reference.querySelectorAll("pre:not([tabindex])")) part.tabIndex = 0; };
new MutationObserver(reach).observe(reference, { childList: true, subtree: true });
SwaggerUIBundle({
  url: reference.dataset.document,
  dom_id: "#reference",
  deepLinking: true,
  validatorUrl: null,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  syntaxHighlight: { activated: false },
  // The path is within a button; a link there is a second control inside of the first.
  plugins: [() => ({ wrapComponents: { DeepLink: (_link, system) => (props) => system.React.createElement("span", null, props.text) } })],
});
