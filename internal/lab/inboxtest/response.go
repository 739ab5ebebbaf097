package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/outrelay/outrelay/internal/service/inbox"
)

// responseOf is a response that names its call.
func responseOf(call string) inbox.Response {
	return inbox.Response{Fingerprint: []byte("print of " + call), Value: []byte(call)}
}

// respond calls OnceResponse with a function that responds with the name of the call.
func (s suite) respond(x *inbox.Inbox, id, call string, cfg inbox.OnceConfig) (inbox.Response, bool, error) {
	return x.OnceResponse(s.ctx(), newEntry(id), func(context.Context) (inbox.Response, error) { return responseOf(call), nil }, cfg)
}

// checkFirstResponse checks that got is the response of the call, which ran just now.
func (s suite) checkFirstResponse(got inbox.Response, repeated bool, call string) {
	s.Helper()
	if repeated {
		s.Fatalf("response %q is repeated, want a new one of call %s", got.Value, call)
	}
	s.checkResponse(got, call)
}

// checkRepeatedResponse checks that got is the stored response of the call.
func (s suite) checkRepeatedResponse(got inbox.Response, repeated bool, call string) {
	s.Helper()
	if !repeated {
		s.Fatalf("response %q is new, want the stored one of call %s", got.Value, call)
	}
	s.checkResponse(got, call)
}

func (s suite) checkResponse(got inbox.Response, call string) {
	s.Helper()
	want := responseOf(call)
	if string(got.Value) != string(want.Value) || string(got.Fingerprint) != string(want.Fingerprint) {
		s.Fatalf("response %q (%q), want that of call %s", got.Value, got.Fingerprint, call)
	}
}

func firstResponseIsReturned(suite suite) {
	for _, claim := range []bool{false, true} {
		cfg := inbox.OnceConfig{Claim: claim}
		id := fmt.Sprintf("claim %t", claim)
		got, repeated, err := suite.respond(suite.Inbox, id, "first", cfg)
		suite.checkSuccess(err)
		suite.checkFirstResponse(got, repeated, "first")
		for _, x := range []*inbox.Inbox{suite.Inbox, suite.Other} {
			got, repeated, err := suite.respond(x, id, "later", cfg)
			suite.checkSuccess(err)
			suite.checkRepeatedResponse(got, repeated, "first")
		}
	}
}

func failureStoresNoResponse(suite suite) {
	for _, claim := range []bool{false, true} {
		cfg := inbox.OnceConfig{Claim: claim}
		id := fmt.Sprintf("claim %t", claim)
		_, repeated, err := suite.Inbox.OnceResponse(suite.ctx(), newEntry(id), func(context.Context) (inbox.Response, error) {
			return responseOf("failed"), errHandler
		}, cfg)
		suite.checkError(err, errHandler)
		if repeated {
			suite.Fatal("a failure counts as repeated")
		}
		got, repeated, err := suite.respond(suite.Other, id, "second", cfg)
		suite.checkSuccess(err)
		suite.checkFirstResponse(got, repeated, "second")
	}
}

// A call of Once has no response, and the error of another key is that of the function.
func responseIsMissing(suite suite) {
	suite.checkSuccess(suite.Inbox.Once(suite.ctx(), newEntry("1"), func(context.Context) error { return nil }, inbox.OnceConfig{}))
	_, repeated, err := suite.respond(suite.Other, "1", "later", inbox.OnceConfig{})
	suite.checkError(err, inbox.ErrNoResponse)
	if !repeated {
		suite.Fatal("the call is not repeated")
	}

	_, repeated, err = suite.Inbox.OnceResponse(suite.ctx(), newEntry("2"), func(ctx context.Context) (inbox.Response, error) {
		return inbox.Response{}, &inbox.DuplicateError{Key: newEntry("1").Key}
	}, inbox.OnceConfig{})
	suite.checkError(err, inbox.ErrDuplicate)
	if repeated || errors.Is(err, inbox.ErrNoResponse) {
		suite.Fatalf("the duplicate of another key counts as that of the call: %v", err)
	}
}

// The response belongs to the transaction of the caller.
func responseRollsBack(suite suite) {
	err := suite.Transaction(suite.ctx(), func(ctx context.Context) error {
		if _, _, err := suite.Inbox.OnceResponse(ctx, newEntry("1"), func(context.Context) (inbox.Response, error) {
			return responseOf("rolled back"), nil
		}, inbox.OnceConfig{}); err != nil {
			return err
		}
		return errHandler
	})
	suite.checkError(err, errHandler)
	got, repeated, err := suite.respond(suite.Inbox, "1", "second", inbox.OnceConfig{})
	suite.checkSuccess(err)
	suite.checkFirstResponse(got, repeated, "second")
}

// Of many calls in two processes, one responds, and all others return its response.
func raceOfResponses(suite suite) {
	const calls = 12
	var group sync.WaitGroup
	responses, fresh, errs := make([]string, calls), make([]bool, calls), make([]error, calls)
	for i := range calls {
		group.Go(func() {
			x := []*inbox.Inbox{suite.Inbox, suite.Other}[i%2]
			got, repeated, err := suite.respond(x, "1", fmt.Sprint("call ", i), inbox.OnceConfig{})
			responses[i], fresh[i], errs[i] = string(got.Value), !repeated, err
		})
	}
	group.Wait()

	first := 0
	for i := range calls {
		suite.checkSuccess(errs[i])
		if fresh[i] {
			first++
			if want := fmt.Sprint("call ", i); responses[i] != want {
				suite.Errorf("the first call has the response %q, want %q", responses[i], want)
			}
		}
		if responses[i] != responses[0] {
			suite.Errorf("calls have the responses %q", responses)
		}
	}
	if first != 1 {
		suite.Errorf("%d calls were the first", first)
	}
}

// When the retention is over, the next call is the first again.
func responseExpires(suite suite) {
	_, _, err := suite.respond(suite.Inbox, "1", "first", inbox.OnceConfig{})
	suite.checkSuccess(err)
	suite.checkSuccess(suite.Expire(suite.ctx()))
	got, repeated, err := suite.respond(suite.Inbox, "1", "second", inbox.OnceConfig{})
	suite.checkSuccess(err)
	suite.checkFirstResponse(got, repeated, "second")
}
