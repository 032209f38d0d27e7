// The dashboard's script: local times, pages that watch themselves, parts that load later, forms that say that they wait.
// Every page works without it.
"use strict";

const POLL_MS = 2000;
const SOONEST_MS = 700;

// ---- times in the reader's own time zone

const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });
const minutes = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", timeZoneName: "short" };
const short = new Intl.DateTimeFormat(undefined, minutes);
const long = new Intl.DateTimeFormat(undefined, { year: "numeric", ...minutes });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short" });
const relative = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });

function ago(at) {
  const seconds = Math.round((at - Date.now()) / 1000);
  for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
    if (Math.abs(seconds) >= size) return relative.format(Math.trunc(seconds / size), unit);
  }
  return relative.format(seconds, "second");
}

function localise(root) {
  for (const place of root.querySelectorAll("time[datetime]")) {
    const at = new Date(place.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    const how = place.dataset.show;
    place.textContent = how === "ago" ? ago(at) : how === "clock" ? clock.format(at) : (at.getFullYear() === new Date().getFullYear() ? short : long).format(at);
    place.title = exact.format(at);
  }
}

// ---- pages that watch themselves: the page is asked for again, and the parts that changed are replaced

const served = new Map();
let tag = null;
let failures = 0;

function note(root) {
  for (const part of root.querySelectorAll("[data-live]")) served.set(part.id, part.outerHTML);
}

function replace(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  for (const fresh of page.querySelectorAll("[data-live]")) {
    const old = document.getElementById(fresh.id);
    if (!old || served.get(fresh.id) === fresh.outerHTML) continue;
    served.set(fresh.id, fresh.outerHTML);
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    const open = [...old.querySelectorAll("details[open][id]")].map((part) => part.id);
    const node = document.importNode(fresh, true);
    if (fresh.getAttribute("role") === "status") {
      // A screen reader tells what changes inside of such a part, not that the part was replaced.
      old.replaceChildren(...node.childNodes);
      localise(old);
      continue;
    }
    const scrolled = [...old.querySelectorAll(".scroll")].map((part) => [part.scrollTop, part.scrollLeft]);
    old.replaceWith(node);
    localise(node);
    node.querySelectorAll(".scroll").forEach((part, at) => {
      if (scrolled[at]) [part.scrollTop, part.scrollLeft] = scrolled[at];
    });
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }
  document.title = page.title;
  const watch = page.body.dataset.watch;
  if (watch === undefined) delete document.body.dataset.watch;
}

async function refresh() {
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html", ...(tag ? { "If-None-Match": tag } : {}) } });
    if (answer.redirected && new URL(answer.url).pathname.endsWith("/login")) return location.assign(answer.url);
    failures = 0;
    if (!answer.ok) return undefined;
    tag = answer.headers.get("ETag");
    replace(await answer.text());
  } catch {
    failures += 1;
  }
  return undefined;
}

function poll() {
  const wait = POLL_MS * Math.min(2 ** failures, 16);
  setTimeout(async () => {
    if (document.visibilityState === "visible") await refresh();
    if (document.body.dataset.watch !== undefined) poll();
  }, wait);
}

function follow(url) {
  let asked = 0;
  let stream = null;
  const soon = () => {
    if (asked) return;
    asked = setTimeout(async () => {
      asked = 0;
      await refresh();
    }, SOONEST_MS);
  };
  const open = () => {
    stream = new EventSource(url);
    for (const kind of ["state", "progress", "worker"]) stream.addEventListener(kind, soon);
    stream.addEventListener("error", () => {
      // The stream of an ended job is not opened again.
      soon();
      if (stream?.readyState === EventSource.CLOSED && document.body.dataset.watch !== undefined) poll();
    });
  };
  // A browser holds few connections to one host: pages that nobody sees give theirs back.
  document.addEventListener("visibilitychange", () => {
    stream?.close();
    stream = null;
    if (document.visibilityState === "visible" && document.body.dataset.watch !== undefined) {
      open();
      soon();
    }
  });
  if (document.visibilityState === "visible") open();
}

// ---- parts of a page that take the service a while

async function load(part, url) {
  part.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(url, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = page.querySelector("[data-part]") ?? page.querySelector(".problem");
    if (found) {
      part.replaceChildren(document.importNode(found, true));
      localise(part);
      for (const form of part.querySelectorAll("form[data-into]")) {
        form.addEventListener("submit", (event) => {
          event.preventDefault();
          const place = new URL(form.action);
          place.search = new URLSearchParams(new FormData(form)).toString();
          load(part, place.href).then(() => part.querySelector("[name=tensor]")?.focus({ preventScroll: true }));
        });
      }
    }
  } catch {
    // The link that the part has instead still works.
  }
  part.removeAttribute("aria-busy");
}

// ---- forms

for (const form of document.querySelectorAll("form[data-waits]")) {
  form.addEventListener("submit", () => {
    const button = form.querySelector("button:not([type=button])");
    button.setAttribute("aria-busy", "true");
    button.textContent = form.dataset.waits;
    setTimeout(() => { button.disabled = true; });
  });
}
// The suggested target follows the chosen format, as long as nobody has written another one.
for (const form of document.querySelectorAll("form[data-suggests]")) {
  const field = (name) => form.elements.namedItem(name);
  const target = field("target");
  let suggested = "suggested" in target.dataset ? target.defaultValue : "";
  form.addEventListener("input", () => {
    const gpus = ["dp", "tp", "pp"].reduce((product, name) => product * (Number(field(name).value) || 1), 1);
    const known = Number(field("dp").value) > 0;
    document.getElementById("gpus").textContent = known ? `For a run on ${gpus} ${gpus === 1 ? "GPU" : "GPUs"}.` : "";
    const chosen = form.querySelector("[name=to]:checked");
    if (!chosen?.dataset.target || (target.value && target.value !== suggested)) return;
    suggested = chosen.dataset.target;
    if (chosen.value === "zero" && known) suggested = suggested.replace(/_deepspeed(?=(\/[^/]*)?$)/, `_${gpus}gpus`);
    target.value = suggested;
  });
}

// A page that comes back from the browser's memory has its buttons as they were left.
window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

const zone = document.getElementById("zone");
if (zone) {
  const named = new Intl.DateTimeFormat(undefined, { timeZoneName: "longOffset" });
  const offset = named.formatToParts(new Date()).find((part) => part.type === "timeZoneName")?.value ?? "";
  zone.textContent = `${named.resolvedOptions().timeZone} (${offset})`;
}
note(document);
localise(document);
for (const part of document.querySelectorAll("[data-load]")) load(part, part.dataset.load);
setInterval(() => localise(document), 10000);
if (document.body.dataset.watch === "poll") poll();
else if (document.body.dataset.watch) follow(document.body.dataset.watch);
