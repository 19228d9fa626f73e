"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  root.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  byId("theme").addEventListener("click", () => root.classList.toggle("dark"));

  const table = byId("collectives");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const bars = new Map([...document.querySelectorAll(".bar")].map((bar) => [bar.dataset.n, bar]));
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const filters = ["role", "kind", "axes"];

  const people = (n) => {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (n < 1000) return unit === "B" ? `${Math.round(n)} B` : `${n.toFixed(1)} ${unit}`;
      n /= 1000;
    }
    return `${n.toFixed(1)} TB`;
  };

  const show = () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const fold = byId("fold").checked;
    let count = 0;
    let bytes = 0;
    for (const row of rows) {
      const found =
        words.every((word) => texts.get(row).includes(word)) &&
        filters.every((name) => !byId(name).value || row.dataset[name] === byId(name).value);
      row.hidden = !found || (fold && row.classList.contains("more"));
      bars.get(row.id.slice(1))?.classList.toggle("dim", !found);
      if (found) {
        count += 1;
        bytes += Number(row.dataset.bytes);
      }
    }
    byId("shown").value = `${count} of ${rows.length}, ${people(bytes)}`;
  };
  for (const id of ["search", "fold", ...filters]) byId(id).addEventListener("input", show);

  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) =>
    head.addEventListener("click", () => {
      const down = head.classList.contains("up");
      heads.forEach((other) => other.classList.remove("up", "down"));
      head.classList.add(down ? "down" : "up");
      const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const order = head.dataset.by === "n" ? (a, b) => value(a) - value(b) : (a, b) => value(a).localeCompare(value(b));
      rows.sort((a, b) => (down ? order(b, a) : order(a, b)));
      body.append(...rows);
    }),
  );

  for (const [number, bar] of bars) {
    bar.addEventListener("click", () => {
      document.querySelectorAll(".here").forEach((old) => old.classList.remove("here"));
      const row = byId(`c${number}`);
      row.hidden = false;
      row.classList.add("here");
      bar.classList.add("here");
      row.scrollIntoView({ block: "center", behavior: "smooth" });
    });
  }
  show();
})();
