// Package opspage serves the operator's page: HTML from embedded templates, over the use-cases of
// internal/operate/admin. Its only state is the last few notices about finished actions.
//
// A viewer sees everything except payloads and can change nothing. Each action shows a preview with
// a count first, and is executed only for the confirmed count. If the count has changed, the page
// asks again. A payload is shown only on request, to a caller that may see it. Everything works with
// the keyboard and without scripts. Scripts add live figures, charts and a color switch. The
// documents contain no inline script or style, so the content security policy allows none.
//
// The overview costs as much as [admin.Operator.Overview], once every two seconds while an operator
// watches it. A list costs one page of that list. A request that exceeds its time limit shows an
// error page.
//
// The listener in front authenticates callers (see [admin.CallerOf]), and limits bodies and rates.
// The page rejects a request without a caller.
package opspage
