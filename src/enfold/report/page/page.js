"use strict";
(() => {
  const root = document.documentElement;

  // Colour theme: system, light or dark. Browsers that store nothing for local files start with the system theme.
  const themes = ["auto", "light", "dark"];
  const names = { auto: "system", light: "light", dark: "dark" };
  const store = (name, value) => { try { localStorage.setItem(name, value); } catch { /* not stored */ } };
  const read = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
  const button = document.getElementById("theme");
  const choose = (theme) => {
    root.dataset.theme = theme;
    if (!button) return;
    button.querySelector("span").textContent = theme;
    button.setAttribute("aria-label", `Colour theme: ${names[theme]}`);
  };
  choose(themes.includes(read("enfold-theme")) ? read("enfold-theme") : "auto");
  button?.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
    choose(next);
    store("enfold-theme", next);
  });

  // Tables: a click on a column sorts by it, a second click reverses the order; cells without a value stay last.
  const order = (column, down) => (one, other) => {
    const [a, b] = [one.cells[column], other.cells[column]];
    const [x, y] = [a, b].map((cell) => (cell.dataset.value === undefined ? NaN : Number(cell.dataset.value)));
    if (!Number.isNaN(x) && !Number.isNaN(y)) return down ? y - x : x - y;
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    return (down ? -1 : 1) * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order(column, down)));
    }));
  }

  // On small screens a tap enlarges a figure to its original size.
  for (const frame of document.querySelectorAll("figure .scroll")) {
    frame.addEventListener("click", () => frame.classList.toggle("zoomed"));
  }

  // Open collapsed text before printing.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));

  document.getElementById("save")?.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([document.getElementById("results").textContent], { type: "application/json" }));
    link.download = "results.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  // A page that is served while its run is in progress polls for changes; a reload restores the scroll position.
  if (document.body.hasAttribute("data-live")) {
    const poll = async () => {
      try {
        const stamp = await (await fetch("stamp", { cache: "no-store" })).text();
        if (stamp !== document.body.dataset.live) return location.reload(); // once: a reload may take longer than the interval
      } catch { /* the server has stopped */ }
      setTimeout(poll, 2000);
    };
    setTimeout(poll, 2000);
  }
})();
