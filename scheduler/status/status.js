"use strict";
// Updates the page in place. Unchanged nodes are not touched, so that focus, selection, opened
// sections and scroll positions are kept.
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
    let node = old.firstChild;
    for (const target of [...fresh.childNodes]) {
      let match = node;
      while (match && !alike(match, target)) match = match.nextSibling;
      if (!match) { old.insertBefore(document.importNode(target, true), node); continue; }
      while (node !== match) { const gone = node; node = node.nextSibling; gone.remove(); }
      if (match.nodeType === Node.ELEMENT_NODE) sync(match, target);
      else if (match.data !== target.data) match.data = target.data;
      node = match.nextSibling;
    }
    while (node) { const gone = node; node = node.nextSibling; gone.remove(); }
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
      announce("Updates automatically.");
    } catch (error) {
      announce("No answer: this is the last known status.");
    }
  }

  function announce(text) {
    if (live.textContent === text) return;
    live.textContent = text;
    if (text.startsWith("No")) said.textContent = text;
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    announce(paused ? "Paused." : "Updates automatically.");
  });
  announce("Updates automatically.");
  setInterval(() => { if (!paused && !document.hidden) refresh(); }, EVERY_MS);
})();
