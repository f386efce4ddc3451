"use strict";
// Brings the page up to date in its place: what did not change is not touched, so that focus,
// selection, open parts and positions of scrolling stay.
(() => {
  const EVERY_MS = 2000;
  const PARTS = ["headline", "asof", "links", "main"];
  const pause = document.getElementById("pause");
  const live = document.getElementById("live");
  const said = document.getElementById("said");
  let paused = false;

  function sync(old, fresh) {
    for (const { name } of [...old.attributes])
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    for (const { name, value } of fresh.attributes)
      if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
    morph(old, fresh);
  }

  function alike(old, fresh) {
    return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && (old.id || "") === (fresh.id || "");
  }

  function morph(old, fresh) {
    let at = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      let found = at;
      while (found && !alike(found, wanted)) found = found.nextSibling;
      if (!found) { old.insertBefore(document.importNode(wanted, true), at); continue; }
      while (at !== found) { const gone = at; at = at.nextSibling; gone.remove(); }
      if (found.nodeType === Node.ELEMENT_NODE) sync(found, wanted);
      else if (found.data !== wanted.data) found.data = wanted.data;
      at = found.nextSibling;
    }
    while (at) { const gone = at; at = at.nextSibling; gone.remove(); }
  }

  async function refresh() {
    try {
      const answer = await fetch("./", { cache: "no-store" });
      if (!answer.ok) throw new Error(await answer.text());
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (paused) return;
      const before = document.getElementById("headline").textContent;
      for (const id of PARTS) sync(document.getElementById(id), fresh.getElementById(id));
      document.title = fresh.title;
      const after = document.getElementById("headline").textContent;
      if (after !== before) said.textContent = after;
      tell("It is kept up to date.");
    } catch (error) {
      tell("No answer: this is what was said last.");
    }
  }

  function tell(text) {
    if (live.textContent === text) return;
    live.textContent = text;
    if (text.startsWith("No")) said.textContent = text;
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    tell(paused ? "Paused." : "It is kept up to date.");
  });
  tell("It is kept up to date.");
  setInterval(() => { if (!paused && !document.hidden) refresh(); }, EVERY_MS);
})();
