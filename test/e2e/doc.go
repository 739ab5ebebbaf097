// Package e2e tests the operator's page in a real browser, with real relays on the shared test servers
// and events in each state. The steps are those of an operator who is on call.
//
// The tests use Chromium or Chrome from the PATH, or download a pinned Chromium. They fail if neither
// is possible. A screenshot of a failure is saved in test/artifacts/e2e, which git ignores; with -e2e.docs one
// of each page.
package e2e
