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

// Preview lets an action only count, and be refused where it would meet another number than was seen.
type Preview struct {
	DryRun bool   `json:"dry_run,omitempty" doc:"Only count."`
	Expect *int64 `json:"expect,omitempty" minimum:"0" doc:"The count of the preview; the action is refused if it matches more or fewer now."`
}

func (p Preview) expected(matched int64) error {
	if p.Expect != nil && *p.Expect != matched {
		return refusal(http.StatusConflict, fmt.Sprintf("%d match now, and %d were expected; nothing was done", matched, *p.Expect), "look at the preview again")
	}
	return nil
}

// DeadQuery says which dead letters, in a query.
type DeadQuery struct {
	Collection
	IDs           []string  `query:"id" maxItems:"1000" doc:"Only letters of these envelopes, separated by commas."`
	From          time.Time `query:"from" doc:"Died then or later."`
	To            time.Time `query:"to" doc:"Died before."`
	Topic         string    `query:"topic" maxLength:"255"`
	Type          string    `query:"type" maxLength:"255"`
	AggregateType string    `query:"aggregate_type" maxLength:"255"`
	Key           string    `query:"key" maxLength:"4096"`
	Class         string    `query:"class" enum:"malformed,message_too_large,not_allowed,partition_out_of_range,expired,record_refused,attempts_exhausted,handler"`
	Message       string    `query:"message" maxLength:"1024" doc:"The reason begins with it."`
	Source        string    `query:"source" enum:"relay,handler"`
	Stand         string    `query:"stand" enum:"any,replayable,replayed"`
}

func (q DeadQuery) filter() admin.DeadFilter {
	return admin.DeadFilter{
		Collection: q.Collection.Collection, IDs: q.IDs, From: q.From, To: q.To, Topic: q.Topic, Type: q.Type, AggregateType: q.AggregateType,
		Key: q.Key, Class: q.Class, Message: q.Message, Source: q.Source, RequeueStatus: q.Stand,
	}
}

// DeadSelection says which dead letters, in a body.
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
	All           bool       `json:"all,omitempty" doc:"Everything is meant, where there is no condition."`
}

func (s DeadSelection) filter() admin.DeadFilter {
	return admin.DeadFilter{
		Collection: s.Collection, IDs: s.IDs, From: or(s.From), To: or(s.To), Topic: s.Topic, Type: s.Type, AggregateType: s.AggregateType,
		Key: s.Key, Class: s.Class, Message: s.Message, Source: s.Source, RequeueStatus: s.Stand, All: s.All,
	}
}

// LetterRef names one letter.
type LetterRef struct {
	Collection
	ID       string `query:"id" required:"true" minLength:"1" maxLength:"4096"`
	Delivery int    `query:"delivery" minimum:"-1" maximum:"2147483647" default:"-1" doc:"-1 is the latest that died."`
}

func (r LetterRef) ref() admin.DeadRef {
	return admin.DeadRef{Collection: r.Collection.Collection, ID: r.ID, Delivery: r.Delivery}
}

// deadGroups is the answer of the summary.
type deadGroups struct {
	Groups []admin.DeadGroup `json:"groups"`
}

// letterOut is one letter, with its version as the entity tag.
type letterOut struct {
	ETag string `header:"ETag"`
	Body admin.DeadLetter
}

// DeadAction is what is done to letters.
type DeadAction struct {
	Scope
	Body struct {
		Filter       DeadSelection `json:"filter"`
		IgnoreExpiry bool          `json:"ignore_expiry,omitempty" doc:"Requeue: also what has expired."`
		Preview
	}
}

func (a *api) dead() {
	look(a, "/dead", "list-dead", "Dead letters, the latest first, without their envelopes", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Paging
		DeadQuery
	},
	) (admin.DeadPage, error) {
		return op.Letters().List(ctx, in.filter(), in.Limit, in.After)
	})
	act(a, "/dead/search", "search-dead", "The same list, with the condition in a body", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			Filter DeadSelection `json:"filter"`
			Limit  int           `json:"limit,omitempty" minimum:"1" maximum:"1000" default:"100"`
			After  string        `json:"after,omitempty" maxLength:"8192"`
		}
	},
	) (admin.DeadPage, error) {
		return op.Letters().List(ctx, in.Body.Filter.filter(), in.Body.Limit, in.Body.After)
	}, viewers)
	look(a, "/dead/summary", "summarize-dead", "Counts by topic, type and class, the most frequent first", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		DeadQuery
	},
	) (deadGroups, error) {
		list, err := op.Letters().Summary(ctx, in.filter())
		return deadGroups{list}, err
	})
	a.letter()
	act(a, "/dead/requeue", "requeue-dead", "Give letters back to their outbox, each as the next delivery of the same envelope", func(ctx context.Context, op admin.Operator, in *DeadAction) (admin.DeadOutcome, error) {
		f, opts := in.Body.Filter.filter(), admin.DeadOptions{IgnoreExpiry: in.Body.IgnoreExpiry, DryRun: in.Body.DryRun}
		if in.Body.Expect != nil && !in.Body.DryRun {
			counted := f
			counted.RequeueStatus = "replayable"
			n, err := op.Letters().Count(ctx, counted)
			if err == nil {
				err = in.Body.expected(n)
			}
			if err != nil {
				return admin.DeadOutcome{Why: []admin.DeadRefused{}}, err
			}
		}
		return op.Letters().Requeue(ctx, f, opts, nil)
	})
	act(a, "/dead/discard", "discard-dead", "Remove letters for good", func(ctx context.Context, op admin.Operator, in *DeadAction) (admin.DeadDiscarded, error) {
		f := in.Body.Filter.filter()
		if in.Body.Expect != nil && !in.Body.DryRun {
			n, err := op.Letters().Count(ctx, f)
			if err == nil {
				err = in.Body.expected(n)
			}
			if err != nil {
				return admin.DeadDiscarded{}, err
			}
		}
		return op.Letters().Discard(ctx, f, in.Body.DryRun, nil)
	})
}

// viewers lets those in who may only look.
func viewers(op *huma.Operation) { op.Extensions[role] = admin.RoleViewer }

// EditBody is a change to the envelope of a letter.
type EditBody struct {
	Payload       *string           `json:"payload,omitempty" doc:"The new payload as text."`
	PayloadBase64 *string           `json:"payload_base64,omitempty" contentEncoding:"base64" doc:"Or its bytes."`
	PayloadAs     string            `json:"payload_as,omitempty" enum:"binary,string,json,null" doc:"The type that it gets; by default that of the old one."`
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
		return out, refusal(http.StatusUnprocessableEntity, "payload and payload_base64 are both given", "give one of them")
	case e.Payload != nil:
		out.Payload = []byte(*e.Payload)
	case e.PayloadBase64 != nil:
		data, err := base64.StdEncoding.DecodeString(*e.PayloadBase64)
		if err != nil {
			return out, refusal(http.StatusUnprocessableEntity, "payload_base64 is not base64", "use the alphabet of RFC 4648 with padding")
		}
		out.Payload = data
	}
	if e.Headers != nil {
		out.Headers = [][2]string{}
	}
	for _, h := range e.Headers {
		out.Headers = append(out.Headers, [2]string{h.Name, h.Value})
	}
	return out, nil
}

// letter registers the operations on one letter. Its version is the entity tag, so that two people do not edit the same.
func (a *api) letter() {
	direct(a, huma.Operation{Method: http.MethodGet, Path: "/dead/letter", OperationID: "show-dead", Summary: "One letter with its envelope and every attempt; the payload only where it is asked for", Extensions: map[string]any{role: admin.RoleViewer}}, lookTime,
		func(ctx context.Context, op admin.Operator, in *struct {
			Scope
			LetterRef
			Payload bool `query:"payload" doc:"Show the payload too; for roles that may see it."`
		},
		) (*letterOut, error) {
			if err := mayShow(ctx, in.Payload); err != nil {
				return nil, err
			}
			d, err := op.Letters().Show(ctx, in.ref(), in.Payload)
			if err != nil {
				return nil, err
			}
			return &letterOut{ETag: `"` + strconv.Itoa(int(d.Version)) + `"`, Body: d}, nil
		}, nil)
	direct(a, huma.Operation{Method: http.MethodPatch, Path: "/dead/letter", OperationID: "edit-dead", Summary: "Give a letter back with a changed envelope; it keeps the one that died", MaxBodyBytes: largeBody, Extensions: map[string]any{role: admin.RoleOperator}}, actTime,
		func(ctx context.Context, op admin.Operator, in *struct {
			Scope
			LetterRef
			IfMatch string `header:"If-Match" doc:"The ETag of the letter that the edit was made from. Required."`
			Body    EditBody
		},
		) (*answerOf[admin.DeadEdited], error) {
			version, err := versionOf(in.IfMatch)
			if err != nil {
				return nil, err
			}
			e, err := in.Body.edit(version)
			if err != nil {
				return nil, err
			}
			out, err := op.Letters().Edit(ctx, in.ref(), e, admin.DeadOptions{IgnoreExpiry: in.Body.IgnoreExpiry, DryRun: in.Body.DryRun})
			if err != nil {
				return nil, err
			}
			return &answerOf[admin.DeadEdited]{out}, nil
		}, []option{func(op *huma.Operation) { op.Errors = append(op.Errors, 412, 428) }})
}

func versionOf(tag string) (int32, error) {
	if tag == "" {
		return 0, refusal(http.StatusPreconditionRequired, "an edit says by If-Match which version of the letter it was made from", "read the letter, and send its ETag")
	}
	text := strings.Trim(strings.TrimPrefix(strings.TrimSpace(tag), "W/"), `"`)
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		return 0, refusal(http.StatusPreconditionFailed, "If-Match is no ETag of a letter", "read the letter, and send its ETag")
	}
	return int32(n), nil
}

// mayShow refuses a payload to those who may not see it.
func mayShow(ctx context.Context, payload bool) error {
	if c, _ := admin.CallerOf(ctx); payload && !c.Payloads {
		return refusal(http.StatusForbidden, "this role may not see payloads", "http.admin.payloads says which role may")
	}
	return nil
}
