package httpapi

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/outrelay/outrelay/internal/admin"
)

// Preview makes an action only count, or makes it fail if the count differs from an earlier preview.
type Preview struct {
	DryRun bool   `json:"dry_run,omitempty" doc:"Only count."`
	Expect *int64 `json:"expect,omitempty" minimum:"0" doc:"The count of the preview. The action fails if another number matches now."`
}

// checkExpected returns a problem if another number matches than expected.
func (p Preview) checkExpected(matched int64) error {
	if p.Expect == nil || *p.Expect == matched {
		return nil
	}
	return newProblem(http.StatusConflict,
		fmt.Sprintf("%d match now, but %d were expected; nothing was done", matched, *p.Expect), "check the preview again")
}

// DeadQuery selects dead letters in a query.
type DeadQuery struct {
	Collection
	IDs           []string  `query:"id" maxItems:"1000" doc:"Only letters of these envelopes, separated by commas."`
	From          time.Time `query:"from" doc:"Died at this time or later."`
	To            time.Time `query:"to" doc:"Died before this time."`
	Topic         string    `query:"topic" maxLength:"255"`
	Type          string    `query:"type" maxLength:"255"`
	AggregateType string    `query:"aggregate_type" maxLength:"255"`
	Key           string    `query:"key" maxLength:"4096"`
	Class         string    `query:"class" enum:"malformed,message_too_large,not_allowed,partition_out_of_range,expired,record_refused,attempts_exhausted,handler"`
	Message       string    `query:"message" maxLength:"1024" doc:"Prefix of the reason."`
	Source        string    `query:"source" enum:"relay,handler"`
	Stand         string    `query:"stand" enum:"any,replayable,replayed"`
}

func (q DeadQuery) filter() admin.DeadFilter {
	return admin.DeadFilter{
		Collection: q.Collection.Collection, IDs: q.IDs, From: q.From, To: q.To,
		Topic: q.Topic, Type: q.Type, AggregateType: q.AggregateType, Key: q.Key,
		Class: q.Class, Message: q.Message, Source: q.Source, RequeueStatus: q.Stand,
	}
}

// DeadSelection selects dead letters in a body.
type DeadSelection struct {
	Collection    string     `json:"collection,omitempty" maxLength:"255"`
	IDs           []string   `json:"ids,omitempty" maxItems:"1000"`
	From          *time.Time `json:"from,omitempty"`
	To            *time.Time `json:"to,omitempty"`
	Topic         string     `json:"topic,omitempty" maxLength:"255"`
	Type          string     `json:"type,omitempty" maxLength:"255"`
	AggregateType string     `json:"aggregate_type,omitempty" maxLength:"255"`
	Key           string     `json:"key,omitempty" maxLength:"4096"`
	Class         string     `json:"class,omitempty" enum:"malformed,message_too_large,not_allowed,partition_out_of_range,expired,record_refused,attempts_exhausted,handler"`
	Message       string     `json:"message,omitempty" maxLength:"1024"`
	Source        string     `json:"source,omitempty" enum:"relay,handler"`
	Stand         string     `json:"stand,omitempty" enum:"any,replayable,replayed"`
	All           bool       `json:"all,omitempty" doc:"Select everything if there is no condition."`
}

func (s DeadSelection) filter() admin.DeadFilter {
	return admin.DeadFilter{
		Collection: s.Collection, IDs: s.IDs, From: timeOrZero(s.From), To: timeOrZero(s.To),
		Topic: s.Topic, Type: s.Type, AggregateType: s.AggregateType, Key: s.Key,
		Class: s.Class, Message: s.Message, Source: s.Source, RequeueStatus: s.Stand, All: s.All,
	}
}

// LetterRef identifies one letter.
type LetterRef struct {
	Collection
	ID       string `query:"id" required:"true" minLength:"1" maxLength:"4096"`
	Delivery int    `query:"delivery" minimum:"-1" maximum:"2147483647" default:"-1" doc:"The delivery that died; -1 selects the latest one."`
}

func (r LetterRef) ref() admin.DeadRef {
	return admin.DeadRef{Collection: r.Collection.Collection, ID: r.ID, Delivery: r.Delivery}
}

// deadGroups is the response of the summary.
type deadGroups struct {
	Groups []admin.DeadGroup `json:"groups"`
}

// letterOut is one letter, with its version as the entity tag.
type letterOut struct {
	ETag string `header:"ETag"`
	Body admin.DeadLetter
}

// DeadAction is an action on letters.
type DeadAction struct {
	Scope
	Body struct {
		Filter       DeadSelection `json:"filter"`
		IgnoreExpiry bool          `json:"ignore_expiry,omitempty" doc:"For a requeue: also expired envelopes."`
		Preview
	}
}

// checkExpected counts the letters and compares the count with the expected one, if there is one.
func (a *DeadAction) checkExpected(ctx context.Context, op admin.Operator, f admin.DeadFilter) error {
	if a.Body.Expect == nil || a.Body.DryRun {
		return nil
	}
	n, err := op.Letters().Count(ctx, f)
	if err != nil {
		return err
	}
	return a.Body.Preview.checkExpected(n)
}

func (a *api) addDead() {
	addQuery(a, "/dead", "list-dead", "List dead letters without their envelopes, newest first",
		func(ctx context.Context, op admin.Operator, in *struct {
			Scope
			Paging
			DeadQuery
		},
		) (admin.DeadPage, error) {
			return op.Letters().List(ctx, in.filter(), in.Limit, in.After)
		})

	addAction(a, "/dead/search", "search-dead", "List dead letters that match a filter in the body",
		func(ctx context.Context, op admin.Operator, in *struct {
			Scope
			Body struct {
				Filter DeadSelection `json:"filter"`
				Limit  int           `json:"limit,omitempty" minimum:"1" maximum:"1000" default:"100"`
				After  string        `json:"after,omitempty" maxLength:"8192"`
			}
		},
		) (admin.DeadPage, error) {
			return op.Letters().List(ctx, in.Body.Filter.filter(), in.Body.Limit, in.Body.After)
		}, forViewers)

	addQuery(a, "/dead/summary", "summarize-dead", "Count dead letters by topic, type and class, largest group first",
		func(ctx context.Context, op admin.Operator, in *struct {
			Scope
			DeadQuery
		},
		) (deadGroups, error) {
			list, err := op.Letters().Summary(ctx, in.filter())
			return deadGroups{list}, err
		})

	a.addLetter()

	addAction(a, "/dead/requeue", "requeue-dead", "Put letters back into their outbox, as the next delivery of the same envelope",
		func(ctx context.Context, op admin.Operator, in *DeadAction) (admin.DeadOutcome, error) {
			f := in.Body.Filter.filter()
			replayable := f
			replayable.RequeueStatus = "replayable"
			if err := in.checkExpected(ctx, op, replayable); err != nil {
				return admin.DeadOutcome{}, err
			}
			opts := admin.DeadOptions{IgnoreExpiry: in.Body.IgnoreExpiry, DryRun: in.Body.DryRun}
			return op.Letters().Requeue(ctx, f, opts, nil)
		})

	addAction(a, "/dead/discard", "discard-dead", "Remove letters permanently",
		func(ctx context.Context, op admin.Operator, in *DeadAction) (admin.DeadDiscarded, error) {
			f := in.Body.Filter.filter()
			if err := in.checkExpected(ctx, op, f); err != nil {
				return admin.DeadDiscarded{}, err
			}
			return op.Letters().Discard(ctx, f, in.Body.DryRun, nil)
		})
}

// EditBody is a change to the envelope of a letter.
type EditBody struct {
	Payload       *string           `json:"payload,omitempty" doc:"The new payload as text."`
	PayloadBase64 *string           `json:"payload_base64,omitempty" contentEncoding:"base64" doc:"The new payload as bytes."`
	PayloadAs     string            `json:"payload_as,omitempty" enum:"binary,string,json,null" doc:"The BSON type of the new payload. Default: the type of the old one."`
	Headers       []EditHeader      `json:"headers,omitempty" maxItems:"1000" doc:"Replace all headers."`
	Fields        map[string]string `json:"fields,omitempty" doc:"Other fields by their name in the envelope."`
	Unset         []string          `json:"unset,omitempty" maxItems:"100" doc:"Fields to remove."`
	IgnoreExpiry  bool              `json:"ignore_expiry,omitempty"`
	DryRun        bool              `json:"dry_run,omitempty"`
}

// EditHeader is one header.
type EditHeader struct {
	Name  string `json:"k" minLength:"1" maxLength:"1024"`
	Value string `json:"v"`
}

func (e EditBody) edit(version int32) (admin.DeadEdit, error) {
	out := admin.DeadEdit{Version: version, PayloadAs: e.PayloadAs, Fields: e.Fields, Unset: e.Unset}
	switch {
	case e.Payload != nil && e.PayloadBase64 != nil:
		return out, newProblem(http.StatusUnprocessableEntity, "the body has both payload and payload_base64", "send one of them")
	case e.Payload != nil:
		out.Payload = []byte(*e.Payload)
	case e.PayloadBase64 != nil:
		data, err := base64.StdEncoding.DecodeString(*e.PayloadBase64)
		if err != nil {
			return out, newProblem(http.StatusUnprocessableEntity, "payload_base64 is not base64",
				"use the alphabet of RFC 4648 with padding")
		}
		out.Payload = data
	}

	// An empty list removes all headers. No list keeps them.
	if e.Headers != nil {
		out.Headers = [][2]string{}
	}
	for _, h := range e.Headers {
		out.Headers = append(out.Headers, [2]string{h.Name, h.Value})
	}
	return out, nil
}

// addLetter registers the operations on one letter. Its version is the entity tag, so that two
// people cannot edit the same version.
func (a *api) addLetter() {
	addOperation(a, huma.Operation{
		Method:      http.MethodGet,
		Path:        "/dead/letter",
		OperationID: "show-dead",
		Summary:     "Show one letter with its envelope and attempts; the payload only on request",
		Extensions:  map[string]any{roleExtension: admin.RoleViewer},
	}, readTime,
		func(ctx context.Context, op admin.Operator, in *struct {
			Scope
			LetterRef
			Payload bool `query:"payload" doc:"Include the payload, if the caller may see it."`
		},
		) (*letterOut, error) {
			if err := checkPayloadAccess(ctx, in.Payload); err != nil {
				return nil, err
			}
			d, err := op.Letters().Show(ctx, in.ref(), in.Payload)
			if err != nil {
				return nil, err
			}
			return &letterOut{ETag: strconv.Quote(strconv.Itoa(int(d.Version))), Body: d}, nil
		})

	addOperation(a, huma.Operation{
		Method:       http.MethodPatch,
		Path:         "/dead/letter",
		OperationID:  "edit-dead",
		Summary:      "Requeue a letter with a changed envelope; the letter keeps the original one",
		MaxBodyBytes: largeBody,
		Extensions:   map[string]any{roleExtension: admin.RoleOperator},
	}, actionTime,
		withBody(func(ctx context.Context, op admin.Operator, in *struct {
			Scope
			LetterRef
			IfMatch string `header:"If-Match" doc:"Required: the ETag of the letter from which the edit was made."`
			Body    EditBody
		},
		) (admin.DeadEdited, error) {
			version, err := parseVersion(in.IfMatch)
			if err != nil {
				return admin.DeadEdited{}, err
			}
			e, err := in.Body.edit(version)
			if err != nil {
				return admin.DeadEdited{}, err
			}
			opts := admin.DeadOptions{IgnoreExpiry: in.Body.IgnoreExpiry, DryRun: in.Body.DryRun}
			return op.Letters().Edit(ctx, in.ref(), e, opts)
		}), func(op *huma.Operation) {
			op.Errors = append(op.Errors, http.StatusPreconditionFailed, http.StatusPreconditionRequired)
		})
}

// parseVersion returns the version of a letter from its entity tag.
func parseVersion(tag string) (int32, error) {
	const hint = "read the letter, and send its ETag in If-Match"
	if tag == "" {
		return 0, newProblem(http.StatusPreconditionRequired,
			"the edit does not name the version of the letter from which it was made", hint)
	}

	text := strings.Trim(strings.TrimPrefix(strings.TrimSpace(tag), "W/"), `"`)
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		return 0, newProblem(http.StatusPreconditionFailed, "If-Match is not the ETag of a letter", hint)
	}
	return int32(n), nil
}

// checkPayloadAccess returns a problem if the caller requests a payload and may not see it.
func checkPayloadAccess(ctx context.Context, payload bool) error {
	if c, _ := admin.CallerOf(ctx); payload && !c.Payloads {
		return newProblem(http.StatusForbidden, "this role may not see payloads", "http.admin.payloads configures which role may")
	}
	return nil
}
