// What the page does with scripts: refreshing, charts, colours, ticking all. Everything else is HTML.
(() => {
  'use strict';
  const every = 2000; // ms between two refreshes
  const points = 2400; // of a chart: a day of minutes, and half an hour of refreshes
  const $ = (id) => document.getElementById(id);
  const kept = {
    get(k) { try { return localStorage.getItem('outrelay.' + k); } catch { return null; } },
    set(k, v) { try { localStorage.setItem('outrelay.' + k, v); } catch { /* not kept */ } },
  };

  // Refreshing: live blocks ask again at each tick. What somebody ticked or types in a block must not vanish below the hands.
  const refresh = $('refresh');
  let paused = kept.get('paused') === '1';
  let last = new Date();
  const label = () => {
    refresh.setAttribute('aria-pressed', String(paused));
    refresh.textContent = paused ? 'Refresh paused' : 'Pause refresh';
    document.body.dataset.paused = String(paused);
  };
  const busyWith = (el) => el && (el.querySelector('input[name=pick]:checked, input[name=scope][value=all]:checked') || el.contains(document.activeElement) && document.activeElement.matches('input,select,textarea'));
  if (document.querySelector('[hx-get]')) {
    refresh.hidden = false;
    label();
    refresh.addEventListener('click', () => {
      paused = !paused;
      kept.set('paused', paused ? '1' : '0');
      label();
      if (!paused) tick();
    });
    setInterval(() => { if (!paused && !document.hidden) tick(); }, every);
  }
  function tick() { document.body.dispatchEvent(new CustomEvent('tick')); }
  const ticked = (e) => e.detail.triggeringEvent?.type === 'tick' || e.detail.requestConfig?.triggeringEvent?.type === 'tick';
  document.body.addEventListener('htmx:beforeRequest', (e) => {
    if (ticked(e) && busyWith(e.detail.elt)) { e.preventDefault(); return; }
    $('busy').hidden = false;
  });
  document.body.addEventListener('htmx:afterRequest', (e) => {
    $('busy').hidden = true;
    const stale = $('stale');
    if (e.detail.successful) { last = new Date(); stale.hidden = true; return; }
    const why = (e.detail.xhr && e.detail.xhr.responseText || 'this node of outrelay does not answer').slice(0, 400);
    stale.textContent = 'Not refreshed since ' + last.toISOString().slice(11, 19) + 'Z; what is shown is as it was then. ' + why;
    stale.hidden = false;
  });

  // A block that is replaced takes the focus with it: it is given back to what stands in its place.
  const focusable = 'a[href],button,input,select,textarea,summary';
  let held = null;
  document.body.addEventListener('htmx:beforeSwap', (e) => {
    const el = document.activeElement, block = e.detail.target;
    held = block.contains(el) ? { href: el.getAttribute('href'), at: [...block.querySelectorAll(focusable)].indexOf(el) } : null;
  });
  document.body.addEventListener('htmx:afterSwap', (e) => {
    if (!held) return;
    const all = [...e.detail.target.querySelectorAll(focusable)];
    const el = all[held.at]?.getAttribute('href') === held.href ? all[held.at] : all.find((x) => held.href && x.getAttribute('href') === held.href) || all[held.at];
    if (el) el.focus({ preventScroll: true });
    held = null;
  });

  // Times: the page has them in UTC. They appear in the zone of the reader, with the exact value on hover.
  function localTimes(root) {
    for (const el of root.querySelectorAll('time[datetime]:not([title])')) {
      const t = new Date(el.dateTime);
      if (Number.isNaN(t.getTime())) continue;
      el.title = t.toISOString();
      const pad = (n) => String(n).padStart(2, '0');
      const clock = pad(t.getHours()) + ':' + pad(t.getMinutes()) + ':' + pad(t.getSeconds());
      const short = /^\d\d:\d\d/.test(el.textContent.trim());
      el.textContent = short ? clock : t.getFullYear() + '-' + pad(t.getMonth() + 1) + '-' + pad(t.getDate()) + ' ' + clock;
    }
  }
  localTimes(document);
  const zone = $('zone');
  if (zone) zone.textContent = 'times are in ' + Intl.DateTimeFormat().resolvedOptions().timeZone + '; hover one for UTC';
  document.body.addEventListener('htmx:afterSettle', () => localTimes(document));

  // Charts: a point a minute from the history that the owners store, then one of each refresh.
  const s = { t: [], rate: [], lag: [] };
  let range = Number(kept.get('range')) || 900; // seconds
  function add(t, rate, lag) {
    if (s.t.length && t <= s.t[s.t.length - 1]) return;
    s.t.push(t); s.rate.push(rate); s.lag.push(lag);
    for (const k of Object.keys(s)) if (s[k].length > points) s[k].shift();
  }
  const charts = {};
  function draw() {
    const f = $('figures');
    if (!f || !window.uPlot) return;
    add(Number(f.dataset.at) / 1000, Number(f.dataset.rate), Number(f.dataset.lag));
    const from = s.t.findIndex((t) => t >= s.t[s.t.length - 1] - range);
    if (s.t.length - from < 2) return;
    for (const name of ['rate', 'lag']) {
      const data = [s.t.slice(from), s[name].slice(from)];
      if (charts[name]) { charts[name].setData(data); continue; }
      const at = $('chart-' + name);
      if (!at) continue;
      at.textContent = '';
      const css = getComputedStyle(document.documentElement);
      const line = css.getPropertyValue('--accent'), text = css.getPropertyValue('--muted'), grid = css.getPropertyValue('--line');
      const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
      charts[name] = new uPlot({
        width: at.clientWidth, height: 120, legend: { show: false }, cursor: { show: false },
        scales: { y: { range: (u, min, max) => [0, Math.max(max * 1.1, 1)] } },
        axes: [{ ...axis, space: 90, values: (u, at) => at.map((t) => new Date(t * 1e3).toTimeString().slice(0, range > 900 ? 5 : 8)) }, { ...axis, size: 56 }],
        series: [{}, { stroke: line, width: 1.5, fill: line + '22' }],
      }, data, at);
    }
  }
  const ranges = document.querySelector('.ranges');
  if (ranges) {
    ranges.hidden = false;
    const mark = () => { for (const b of ranges.children) b.setAttribute('aria-pressed', String(Number(b.dataset.range) === range)); };
    mark();
    ranges.addEventListener('click', (e) => {
      if (!e.target.dataset.range) return;
      range = Number(e.target.dataset.range);
      kept.set('range', range);
      mark();
      redraw();
    });
    fetch('/history' + location.search).then((r) => r.ok ? r.json() : []).then((list) => {
      const later = s.t.map((t, i) => [t, s.rate[i], s.lag[i]]);
      for (const k of Object.keys(s)) s[k] = [];
      for (const p of list.concat(later)) add(...p);
      redraw();
    }).catch(() => { /* the chart begins with the next refresh */ });
  }
  function redraw() {
    for (const name of Object.keys(charts)) { charts[name].destroy(); delete charts[name]; }
    draw();
  }
  document.body.addEventListener('htmx:afterSettle', draw);
  new ResizeObserver(() => {
    for (const [name, c] of Object.entries(charts)) c.setSize({ width: $('chart-' + name).clientWidth, height: 120 });
  }).observe(document.body);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);

  // Colours: as the system has them, dark, light.
  const themes = ['system', 'dark', 'light'];
  const theme = $('theme');
  let now = document.documentElement.dataset.theme || 'system';
  const tell = () => { theme.textContent = 'Theme: ' + now; };
  theme.hidden = false;
  tell();
  theme.addEventListener('click', () => {
    now = themes[(themes.indexOf(now) + 1) % themes.length];
    if (now === 'system') delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = now;
    kept.set('theme', now);
    tell();
    redraw();
  });

  // Ticking. Listened to on the document: blocks are replaced.
  document.addEventListener('change', (e) => {
    const form = e.target.closest && e.target.closest('[data-ticks]');
    if (!form) return;
    const picks = [...form.querySelectorAll('input[name=pick]')];
    if (e.target.matches('[data-tick-all]')) for (const p of picks) p.checked = e.target.checked;
    const n = picks.filter((p) => p.checked).length;
    const all = form.querySelector('[data-tick-all]');
    if (all) { all.checked = n > 0 && n === picks.length; all.indeterminate = n > 0 && n < picks.length; }
    for (const s of form.querySelectorAll('[data-ticked]')) s.textContent = '(' + n + ')';
  });

  draw();
})();
