package httpapi

// formerPaths are former paths, with what takes their place.
var formerPaths = map[string]string{
	"/api/v1/events":          "call /api/v1/audit, which replaces it",
	"/api/v1/events/trim":     "call /api/v1/audit/trim, which replaces it",
	"/api/v1/failed":          "call /api/v1/waiting?failed=true, which replaces it",
	"/api/v1/health":          "call /api/v1/problems, which replaces it",
	"/api/v1/indexes":         "run `outrelay doctor`, which reports missing indexes",
	"/api/v1/indexes/rebuild": "run `outrelay setup`, which creates missing indexes",
	"/api/v1/migrations":      "run `outrelay setup`, which creates the state collections and indexes",
	"/api/v1/pending":         "call /api/v1/waiting/topics, which replaces it",
	"/api/v1/recover/adopt":   "call /api/v1/recover/accept-copy, which replaces it",
}
