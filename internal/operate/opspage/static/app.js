// What the page does with scripts: refreshing, counts, charts, times, colours, ticking, rows. Everything else is HTML.
(() => {
  'use strict';
  const every = 2000; // ms between two refreshes
  const again = 60000; // ms between two readings of the history, which gets a point a minute
  const points = 2400; // of refreshes, should the history get none
  const $ = (id) => document.getElementById(id);
  const kept = {
    get(k) { try { return localStorage.getItem('outrelay.' + k); } catch { return null; } },
    set(k, v) { try { localStorage.setItem('outrelay.' + k, v); } catch { /* not kept */ } },
  };

  // On a narrow screen the line of pages scrolls sideways. The present page must be in view.
  const areas = document.querySelector('.areas');
  const present = areas?.querySelector('[aria-current]');
  if (present) {
    const shown = new ResizeObserver(() => { areas.scrollLeft = present.offsetLeft - areas.offsetLeft - (areas.clientWidth - present.offsetWidth) / 2; });
    // The counts appear later, and make the lists longer.
    for (const el of [areas, ...areas.querySelectorAll('ul')]) shown.observe(el);
  }

  // Refreshing: live blocks ask again at each tick. What somebody ticked or types in a block must not vanish below the hands.
  const refresh = $('refresh');
  let paused = kept.get('paused') === '1';
  let last = new Date();
  const label = () => {
    refresh.setAttribute('aria-pressed', String(paused));
    refresh.textContent = paused ? 'Refresh paused' : 'Pause refresh';
    document.body.dataset.paused = String(paused);
  };
  const busyWith = (el) => el && (document.querySelector(':popover-open') || el.querySelector('input[name=pick]:checked, input[name=scope]:checked') || el.contains(document.activeElement) && document.activeElement.matches('input,select,textarea') || !getSelection().isCollapsed && el.contains(getSelection().anchorNode));
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
    const why = (e.detail.xhr && e.detail.xhr.responseText || 'this node of outrelay does not respond').slice(0, 400);
    stale.textContent = 'Not refreshed since ' + last.toLocaleTimeString('en-GB') + '; the figures are of that time. ' + why;
    stale.hidden = false;
  });

  // A block that is replaced takes the focus and what is unfolded with it: both are given back to what stands in its place.
  const focusable = 'a[href],button,input,select,textarea,summary';
  let held = null, unfolded = [];
  document.body.addEventListener('htmx:beforeSwap', (e) => {
    const block = e.detail.target;
    // The new block lacks the button that copies. Its link has the focus in its place.
    if (block.contains(floating)) {
      if (document.activeElement === floating) (floating.parentElement.querySelector('a') ?? refresh).focus({ preventScroll: true });
      floating.remove();
    }
    const el = document.activeElement;
    unfolded = [...block.querySelectorAll('details[id][open]')].map((d) => d.id);
    held = block.contains(el) ? { href: el.getAttribute('href'), at: [...block.querySelectorAll(focusable)].indexOf(el) } : null;
  });
  document.body.addEventListener('htmx:afterSwap', (e) => {
    for (const id of unfolded) { const d = $(id); if (d) d.open = true; }
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
  const zone = $('zone'), here = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (zone) zone.textContent = 'times are in ' + here + '; point at one for UTC';
  document.body.addEventListener('htmx:afterSettle', () => localTimes(document));

  // Inputs of times: the server reads and writes UTC, and the reader types the own time.
  for (const el of document.querySelectorAll('[data-utc]')) {
    if (!el.value) continue;
    const t = new Date(el.value + 'Z');
    el.value = new Date(t - t.getTimezoneOffset() * 60000).toISOString().slice(0, t.getSeconds() ? 19 : 16);
  }
  for (const el of document.querySelectorAll('[data-zone]')) { el.textContent = '(local time)'; el.title = here; }
  document.addEventListener('formdata', (e) => {
    for (const el of e.target.querySelectorAll('[data-utc]')) {
      if (el.value) e.formData.set(el.name, new Date(el.value).toISOString().replace('.000Z', 'Z'));
    }
    // The address of a filtered list has only the conditions that are set.
    if (e.target.method === 'get') for (const [name, value] of [...e.formData]) if (!value) e.formData.delete(name);
  });

  // Counts in the navigation: those of the line of figures, or of the overview.
  function count() {
    const f = document.querySelector('[data-problems]');
    for (const el of document.querySelectorAll('[data-count]')) {
      const n = f ? Number(f.dataset[el.dataset.count]) : 0;
      el.hidden = !n;
      el.textContent = n > 999 ? '999+' : String(n);
    }
  }
  document.body.addEventListener('htmx:afterSettle', count);

  // A row opens the details of its entry, as its link does. Text in it can still be selected.
  document.addEventListener('click', (e) => {
    const row = e.target.closest('tr');
    const open = row && row.querySelector('[data-open]');
    if (!open || e.target.closest('a,button,input,label,select,summary') || !getSelection().isCollapsed) return;
    if (e.ctrlKey || e.metaKey) window.open(open.href); else open.click();
  });

  // Copying: by a selection, because the clipboard of scripts needs HTTPS and a permission.
  const addCopy = () => {
    for (const el of document.querySelectorAll('[data-copy]:not(:has(+ .copy))')) {
      const b = document.createElement('button');
      b.type = 'button';
      b.className = 'copy';
      b.textContent = 'Copy';
      b.setAttribute('aria-label', 'Copy ' + el.dataset.copy);
      b.addEventListener('click', () => {
        getSelection().selectAllChildren(el);
        b.textContent = document.execCommand('copy') ? 'Copied' : 'Not copied';
        getSelection().removeAllRanges();
      });
      el.after(b);
    }
  };
  addCopy();
  document.body.addEventListener('htmx:afterSettle', addCopy);

  // One button for all shortened texts of tables: it appears at the one under the pointer, or at the link with the focus.
  const floating = document.createElement('button');
  floating.type = 'button';
  floating.className = 'copy floating';
  const offerCopy = (e) => {
    const cell = e.target.closest?.('.cut');
    // A button with the focus stays where it is.
    if (!cell || document.activeElement === floating || floating.parentElement === cell || !cell.querySelector('.mid')) return;
    floating.textContent = 'Copy';
    floating.setAttribute('aria-label', 'Copy ' + cell.dataset.label);
    cell.append(floating);
  };
  const endCopy = (e) => {
    // The pointer leaves the button to a link with the focus.
    if (e.relatedTarget?.closest?.('.cut') || floating.parentElement?.contains(document.activeElement)) return;
    floating.remove();
  };
  document.addEventListener('mouseover', offerCopy);
  document.addEventListener('mouseout', endCopy);
  document.addEventListener('focusin', offerCopy);
  document.addEventListener('focusout', endCopy);
  floating.addEventListener('click', () => {
    getSelection().selectAllChildren(floating.parentElement.querySelector('.mid'));
    floating.textContent = document.execCommand('copy') ? 'Copied' : 'Not copied';
    getSelection().removeAllRanges();
  });

  // A link into a folded part unfolds it, also in browsers that do not.
  document.addEventListener('click', (e) => {
    const part = e.target.closest?.('a[href^="#"]')?.hash.slice(1), fold = part && $(part)?.closest('details');
    if (fold) fold.open = true;
  });

  // The two parts of a shortened text are boxes of their own, between which browsers copy the end of a line.
  document.addEventListener('copy', (e) => {
    const selected = getSelection(), part = (n) => (n?.nodeType === 1 ? n : n?.parentElement)?.closest('.mid');
    if (!part(selected.anchorNode) || part(selected.anchorNode) !== part(selected.focusNode)) return;
    e.clipboardData.setData('text/plain', selected.toString().replaceAll('\n', ''));
    e.preventDefault();
  });

  // Escape leaves a question, as its link does.
  document.addEventListener('keydown', (e) => {
    const back = e.key === 'Escape' && !document.querySelector(':popover-open') && document.querySelector('[data-escape]');
    if (back) back.click();
  });

  // Charts: a point a minute from the history that the owners store, then one of each refresh. Latency has points of the history only.
  const names = ['t', 'rate', 'lag', 'p50', 'p99'];
  const plots = { rate: { series: ['rate'], unit: '/s' }, lag: { series: ['lag'], unit: ' s' }, p99: { series: ['p99', 'p50'], unit: ' ms' } };
  let stored = [], live = []; // points of the history, and of the refreshes after it, with the values of names
  let s = {}; // each series of both
  let marks = []; // takeovers, pauses and gaps
  let readAt = 0; // when the history was requested
  let range = Number(kept.get('range')) || 900; // seconds
  async function readHistory() {
    readAt = Date.now();
    try {
      const response = await fetch(document.documentElement.dataset.base + '/history' + location.search);
      // The refresh shows a failure. The charts keep their points.
      if (!response.ok) return;
      const found = await response.json();
      // A latency of 0 means that nothing was measured.
      stored = found.points.map(([t, rate, lag, p50, p99]) => [t, rate, lag, p50 || null, p99 || null]);
      marks = found.marks;
      const last = stored.at(-1)?.[0] ?? 0;
      live = live.filter(([t]) => t > last);
      draw();
    } catch { /* no response is a failure too */ }
  }
  function addPoint(f) {
    const at = Number(f.dataset.at) / 1000, last = live.at(-1) ?? stored.at(-1) ?? [0];
    if (at > last[0]) live.push([at, Number(f.dataset.rate), f.dataset.lag ? Number(f.dataset.lag) : null, null, null]);
    if (live.length > points) live.shift();
    const all = [...stored, ...live];
    s = Object.fromEntries(names.map((name, i) => [name, all.map((p) => p[i])]));
  }
  const text = (v) => v == null ? 'none' : v.toLocaleString('en', { maximumFractionDigits: v < 10 ? 1 : 0 });
  const clock = (t) => new Date(t * 1e3).toTimeString().slice(0, 8);
  const charts = {};
  function draw() {
    const f = $('figures');
    if (!f || !window.uPlot || !$('charts')) return;
    if (Date.now() - readAt >= again) readHistory();
    addPoint(f);
    const from = s.t.findIndex((t) => t >= s.t[s.t.length - 1] - range);
    if (s.t.length - from < 2) return;
    $('charts').hidden = false;
    describe(from);
    for (const [name, plot] of Object.entries(plots)) {
      const data = [s.t.slice(from), ...plot.series.map((k) => s[k].slice(from))];
      if (charts[name]) { charts[name].setData(data); continue; }
      const at = $('chart-' + name);
      if (!at) continue;
      at.textContent = '';
      const css = getComputedStyle(document.documentElement);
      const line = css.getPropertyValue('--accent'), muted = css.getPropertyValue('--muted'), grid = css.getPropertyValue('--line'), mark = css.getPropertyValue('--warn');
      const axis = { stroke: muted, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
      charts[name] = new uPlot({
        width: at.clientWidth, height: 160, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: { y: { range: (u, min, max) => [0, Math.max((max ?? 0) * 1.1, 1)] } },
        axes: [{ ...axis, size: 32, space: 90, values: (u, at) => at.map((t) => clock(t).slice(0, range > 900 ? 5 : 8)) }, { ...axis, size: 56 }],
        series: [{}, ...plot.series.map((k, i) => ({ stroke: i ? muted : line, width: 1.5, dash: i ? [4, 3] : undefined, fill: i ? undefined : line + '22', spanGaps: k.startsWith('p') }))],
        hooks: {
          setCursor: [(u) => point(name, u)],
          draw: [(u) => {
            u.ctx.save();
            u.ctx.strokeStyle = mark;
            u.ctx.setLineDash([3, 3]);
            for (const m of marks) {
              if (m.at < u.scales.x.min || m.at > u.scales.x.max) continue;
              const x = Math.round(u.valToPos(m.at, 'x', true));
              u.ctx.beginPath();
              u.ctx.moveTo(x, u.bbox.top);
              u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
              u.ctx.stroke();
            }
            u.ctx.restore();
          }],
        },
      }, data, at);
    }
  }
  // The value under the pointer, with a mark that is near.
  function point(name, u) {
    const i = u.cursor.idx, out = $('summary-' + name);
    if (i == null || u.cursor.left < 0) { out.textContent = out.dataset.all || ''; return; }
    const t = u.data[0][i];
    const near = marks.find((m) => Math.abs(m.at - u.posToVal(u.cursor.left, 'x')) < range / 60);
    const values = plots[name].series.map((k, n) => (plots[name].series.length > 1 ? k + ' ' : '') + text(u.data[n + 1][i]) + (u.data[n + 1][i] == null ? '' : plots[name].unit));
    out.textContent = clock(t) + ' ' + values.join(', ') + (near ? ', ' + clock(near.at) + ' ' + near.text : '');
  }
  // The charts in words, and as a table of a dozen rows.
  function describe(from) {
    for (const name of Object.keys(plots)) {
      const list = s[name].slice(from).filter((v) => v != null), out = $('summary-' + name);
      $('chart-' + name).classList.toggle('none', !list.length);
      out.dataset.all = list.length ? 'now ' + text(list[list.length - 1]) + ', least ' + text(Math.min(...list)) + ', most ' + text(Math.max(...list)) : 'not measured in this range';
      if (!charts[name] || charts[name].cursor.left < 0) out.textContent = out.dataset.all;
    }
    const seen = marks.filter((m) => m.at >= s.t[from]), listed = $('marks');
    listed.textContent = seen.length ? 'Marks: ' : '';
    for (const m of seen.slice(-8)) {
      const a = document.createElement('a');
      a.href = m.link;
      a.textContent = clock(m.at) + ' ' + m.text;
      listed.append(a, ' ');
    }
    const rows = $('chart-table').open ? $('chart-table').querySelector('tbody') : null;
    if (!rows) return;
    rows.textContent = '';
    const part = range / 12, end = s.t[s.t.length - 1];
    for (let i = 0; i < 12; i++) {
      const begin = end - part * (i + 1), until = end - part * i;
      const at = s.t.map((t, k) => k).filter((k) => k >= from && s.t[k] > begin && s.t[k] <= until);
      if (!at.length) continue;
      const row = rows.insertRow();
      const time = document.createElement('time');
      time.dateTime = new Date(begin * 1e3).toISOString();
      time.textContent = '00:00';
      row.insertCell().append(time);
      for (const name of Object.keys(plots)) {
        const values = at.map((k) => s[name][k]).filter((v) => v != null), cell = row.insertCell();
        cell.className = 'num';
        cell.textContent = values.length ? text(Math.max(...values)) : '–';
      }
      row.insertCell().textContent = marks.filter((m) => m.at > begin && m.at <= until).map((m) => m.text).join(', ') || '–';
      ['From', 'Records/s', 'Lag', 'Latency p99', 'Happened'].forEach((label, k) => { row.cells[k].dataset.label = label; });
    }
    localTimes(rows);
  }
  const ranges = document.querySelector('.ranges');
  if (ranges) {
    $('chart-table').addEventListener('toggle', draw);
    const mark = () => { for (const b of ranges.children) b.setAttribute('aria-pressed', String(Number(b.dataset.range) === range)); };
    mark();
    ranges.addEventListener('click', (e) => {
      if (!e.target.dataset.range) return;
      range = Number(e.target.dataset.range);
      kept.set('range', range);
      mark();
      redraw();
    });
  }
  function redraw() {
    for (const name of Object.keys(charts)) { charts[name].destroy(); delete charts[name]; }
    draw();
  }
  document.body.addEventListener('htmx:afterSettle', draw);
  new ResizeObserver(() => {
    for (const [name, c] of Object.entries(charts)) c.setSize({ width: $('chart-' + name).clientWidth, height: 160 });
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

  // Who types a payload or headers wants to replace them.
  document.addEventListener('input', (e) => {
    const box = e.target.matches('textarea') && e.target.form?.elements['replace-' + e.target.name];
    if (box) box.checked = true;
  });

  // Ticking. Listened to on the document: blocks are replaced. Shift ticks everything between two boxes.
  let lastPick = null;
  document.addEventListener('click', (e) => {
    if (!e.target.matches('input[name=pick]')) return;
    const picks = [...document.querySelectorAll('input[name=pick]')];
    const from = picks.findIndex((p) => p.value === lastPick), to = picks.indexOf(e.target);
    if (e.shiftKey && from >= 0) for (const p of picks.slice(Math.min(from, to), Math.max(from, to) + 1)) p.checked = e.target.checked;
    getSelection().removeAllRanges();
    lastPick = e.target.value;
  });
  document.addEventListener('change', (e) => {
    const form = e.target.closest && e.target.closest('[data-ticks]');
    if (!form) return;
    const picks = [...form.querySelectorAll('input[name=pick]')];
    if (e.target.matches('[data-tick-all]')) for (const p of picks) p.checked = e.target.checked;
    const n = picks.filter((p) => p.checked).length;
    const all = form.querySelector('[data-tick-all]');
    if (all) { all.checked = n > 0 && n === picks.length; all.indeterminate = n > 0 && n < picks.length; }
    // The server has written the noun of the selection.
    const everything = form.querySelector('[name=scope]');
    for (const s of form.querySelectorAll('[data-selected]')) s.textContent = everything?.checked ? 'All that match selected' : n + ' selected';
  });

  count();
  draw();
})();
