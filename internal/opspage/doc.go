// Package opspage is the operator's page: HTML from templates that are in the binary, over the use-cases of internal/admin
// and nothing else. It keeps no state of its own but the last few notices of what was done.
//
// What it promises. Whoever is a viewer sees everything but payloads and can change nothing; each action is asked about
// first, with a count of what it would do, and is carried out only for what was confirmed: if the count has changed, the
// question is put again. A payload is shown only where somebody who may see it asks for it. Everything works with the
// keyboard and without scripts, which add figures that move, charts and a switch of colours. There is no script or style in
// the documents, so the policy that it sends allows none.
//
// What it costs. The overview costs what [admin.Operator.Overview] does, once every two seconds while somebody looks at it. A
// list costs one page of that list. A question that takes longer than its time-out becomes a page that says so.
//
// It trusts the listener in front of it for who calls (see [admin.CallerOf]), for bounds of bodies and rates; a request
// without a caller is refused.
package opspage
