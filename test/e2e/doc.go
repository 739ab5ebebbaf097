// Package e2e drives the operator's page in a real browser, against real relays on the shared test servers: what people do
// at night, with events in every state.
//
// It takes Chromium or Chrome from the PATH or fetches a pinned Chromium, and fails if it can do neither. Screenshots are left in test/artifacts/e2e, which git ignores.
package e2e
