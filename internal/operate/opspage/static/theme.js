// Runs before the page is drawn, so that the colours do not change before people's eyes.
try {
  const theme = localStorage.getItem('outrelay.theme');
  if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
} catch { /* storage is switched off: the system's colours stay */ }
