package bearer

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strings"
	"sync"
	"time"
)

const (
	// fetchTimeout bounds one request for a token. It does not end with the connection that needs the token, so that the next
	// connection finds the result.
	fetchTimeout = 15 * time.Second
	// maxLifetime is the longest time for which a token is kept, even if it claims a longer lifetime.
	maxLifetime = 24 * time.Hour
)

// fetch requests a token. expires is zero if its lifetime is unknown.
type fetch func(ctx context.Context) (token string, expires time.Time, err error)

// keeper keeps one token.
type keeper struct {
	fetch fetch

	mu      sync.Mutex
	token   string
	renewAt time.Time
	expires time.Time
	running *request // nil: none
}

// request is a fetch that runs. Its results are set when done is closed.
type request struct {
	done  chan struct{}
	token string
	err   error
}

// keep returns a Source that keeps the token of fetch for 80 % of its lifetime. Connections that need a token at the same time share
// one request. If a request fails, the last token is used until it expires.
func keep(fetch fetch) Source {
	keeper := &keeper{fetch: fetch}
	return keeper.get
}

func (k *keeper) get(ctx context.Context) (string, error) {
	k.mu.Lock()
	if time.Now().Before(k.renewAt) {
		defer k.mu.Unlock()
		return k.token, nil
	}
	current := k.running
	if current == nil {
		current = &request{done: make(chan struct{})}
		k.running = current
		go k.run(context.WithoutCancel(ctx), current)
	}
	k.mu.Unlock()

	select {
	case <-current.done:
		return current.token, current.err
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// run performs request.
func (k *keeper) run(ctx context.Context, request *request) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	began := time.Now()
	token, expires, err := k.fetch(ctx)

	k.mu.Lock()
	defer k.mu.Unlock()
	k.running = nil
	switch {
	case err == nil:
		// A token with a very long lifetime is renewed as well, so that a revoked one does not stay in use.
		if limit := began.Add(maxLifetime); expires.After(limit) {
			expires = limit
		}
		k.token, k.expires = token, expires
		k.renewAt = began.Add(expires.Sub(began) * 4 / 5)
	// The old token is valid, so the failed renewal is no error yet.
	case time.Now().Before(k.expires):
		token, err = k.token, nil
	}
	request.token, request.err = token, err
	close(request.done)
}

// expiry returns the time at which a JWT expires, or the zero time if token is none. The client does not check the signature: it
// uses the time only to request the next token early enough.
func expiry(token string) time.Time {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}
	}

	claims, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(parts[1], "="))
	if err != nil {
		return time.Time{}
	}

	var payload struct {
		Expires float64 `json:"exp"`
	}
	if json.Unmarshal(claims, &payload) != nil || payload.Expires <= 0 || payload.Expires > 1<<40 {
		return time.Time{}
	}

	return time.Unix(int64(payload.Expires), 0)
}
