package httpapi

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/tasks"
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

// letterOut is one letter, with its version as the entity tag.
type letterOut struct {
	ETag string `header:"ETag"`
	Body admin.DeadLetter
}

// DeadAction is an action on letters.
type DeadAction struct {
	Scope
	Body struct {
		Filter       admin.DeadFilter `json:"filter"`
		IgnoreExpiry bool             `json:"ignore_expiry,omitempty" doc:"For a requeue of dead letters of the relay: also expired envelopes."`
		Handlers     []string         `json:"handlers,omitempty" maxItems:"100" doc:"For a requeue of dead letters of handlers: the handlers that get the messages. Default: the handler that gave up."`
		ToTopic      string           `json:"to_topic,omitempty" maxLength:"249" doc:"For a requeue of dead letters of the relay: the only topic that gets the events. Default: the topics that the routing chooses."`
		Preview
	}
}

// options returns the options of a requeue.
func (a *DeadAction) options() admin.DeadOptions {
	body := &a.Body
	return admin.DeadOptions{IgnoreExpiry: body.IgnoreExpiry, Handlers: body.Handlers, Topic: body.ToTopic, DryRun: body.DryRun}
}

// count sets the total of the task to the number of the letters, and compares it with the expected number, if there is one.
func (a *DeadAction) count(ctx context.Context, op admin.Operator, filter admin.DeadFilter, task *tasks.Task) error {
	if a.Body.DryRun || filter.Empty() && !filter.All {
		return nil
	}
	n, err := op.Letters().Count(ctx, filter)
	if err != nil {
		return err
	}
	task.SetTotal(n)
	return a.Body.checkExpected(n)
}

func (a *api) addDead() {
	addQuery(a, "/dead", "list-dead", "List dead letters without their envelopes, newest first",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Paging
			admin.DeadFilter
		},
		) (admin.Page[admin.DeadLetter], error) {
			return op.Letters().List(ctx, input.DeadFilter, input.Limit, input.After)
		})

	addAction(a, "/dead/search", "search-dead", "List dead letters that match a filter in the body",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				Filter admin.DeadFilter `json:"filter"`
				Limit  int              `json:"limit,omitempty" minimum:"1" maximum:"1000" default:"100"`
				After  string           `json:"after,omitempty" maxLength:"8192"`
			}
		},
		) (admin.Page[admin.DeadLetter], error) {
			return op.Letters().List(ctx, input.Body.Filter, input.Body.Limit, input.Body.After)
		}, forViewers)

	addList(a, "/dead/summary", "summarize-dead", "Group dead letters by their failure: who gave up, topic, type, class, and message without numbers, ids and quoted texts; largest group first", "groups",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			admin.DeadFilter
		},
		) ([]admin.DeadGroup, error) {
			return op.Letters().Summary(ctx, input.DeadFilter)
		})

	a.addLetter()

	addLongAction(a, "/dead/requeue", "requeue-dead", "Deliver dead letters again, or hand them back to their handlers, as the next delivery",
		func(ctx context.Context, op admin.Operator, input *DeadAction, task *tasks.Task) (admin.DeadOutcome, error) {
			opts := input.options()
			filter, err := opts.Restrict(op, input.Body.Filter)
			if err != nil {
				return admin.DeadOutcome{}, err
			}
			// The caller has counted letters that can be requeued, so the comparison must not count the others.
			open := filter
			open.RequeueStatus = "false"
			if err := input.count(ctx, op, open, task); err != nil {
				return admin.DeadOutcome{}, err
			}
			return op.Letters().Requeue(ctx, filter, opts, task.SetDone)
		})

	addLongAction(a, "/dead/discard", "discard-dead", "Move dead letters into the archive, or remove them permanently if they are there or there is none",
		func(ctx context.Context, op admin.Operator, input *DeadAction, task *tasks.Task) (admin.DeadDiscarded, error) {
			filter := input.Body.Filter
			if err := input.count(ctx, op, filter, task); err != nil {
				return admin.DeadDiscarded{}, err
			}
			return op.Letters().Discard(ctx, filter, admin.Effect(input.Body.DryRun), task.SetDone)
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
	Handlers      []string          `json:"handlers,omitempty" maxItems:"100" doc:"For a dead letter of a handler: the handlers that get the message. Default: the handler that gave up."`
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
		Summary:     "Show one dead letter with its envelope and attempts; the payload only on request",
		Extensions:  map[string]any{roleExtension: admin.RoleViewer},
	}, readTime,
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			admin.DeadRef
			Payload bool `query:"payload" doc:"Include the payload, if the caller may see it."`
		},
		) (*letterOut, error) {
			if err := checkPayloadAccess(ctx, input.Payload); err != nil {
				return nil, err
			}
			letter, err := op.Letters().Show(ctx, input.DeadRef, admin.Detail(input.Payload))
			if err != nil {
				return nil, err
			}
			return &letterOut{ETag: strconv.Quote(strconv.Itoa(int(letter.Version))), Body: letter}, nil
		})

	addOperation(a, huma.Operation{
		Method:       http.MethodPatch,
		Path:         "/dead/letter",
		OperationID:  "edit-dead",
		Summary:      "Requeue a dead letter with a changed envelope; the dead letter keeps the original one",
		Responses:    responseWith(bodyOf[admin.DeadEdited](a)),
		MaxBodyBytes: largeBody,
		Extensions:   map[string]any{roleExtension: admin.RoleOperator},
	}, actionTime,
		withBody(func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			admin.DeadRef
			IfMatch string `header:"If-Match" doc:"Required: the ETag of the dead letter from which the edit was made."`
			Body    EditBody
		},
		) (admin.DeadEdited, error) {
			version, err := parseVersion(input.IfMatch)
			if err != nil {
				return admin.DeadEdited{}, err
			}
			edit, err := input.Body.edit(version)
			if err != nil {
				return admin.DeadEdited{}, err
			}
			opts := admin.DeadOptions{IgnoreExpiry: input.Body.IgnoreExpiry, Handlers: input.Body.Handlers, DryRun: input.Body.DryRun}
			return op.Letters().Edit(ctx, input.DeadRef, edit, opts)
		}), func(op *huma.Operation) {
			op.Errors = append(op.Errors, http.StatusPreconditionFailed, http.StatusPreconditionRequired)
		})
}

// parseVersion returns the version of a letter from its entity tag.
func parseVersion(tag string) (int32, error) {
	const fix = "read the dead letter, and send its ETag in If-Match"
	if tag == "" {
		return 0, newProblem(http.StatusPreconditionRequired,
			"the edit does not name the version of the dead letter from which it was made", fix)
	}

	text := strings.Trim(strings.TrimPrefix(strings.TrimSpace(tag), "W/"), `"`)
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		return 0, newProblem(http.StatusPreconditionFailed, "If-Match is not the ETag of a dead letter", fix)
	}
	return int32(n), nil
}

// checkPayloadAccess returns a problem if the caller requests a payload and may not see it.
func checkPayloadAccess(ctx context.Context, payload bool) error {
	if caller, _ := admin.CallerOf(ctx); payload && !caller.Payloads {
		return newProblem(http.StatusForbidden, "this role may not see payloads", "http.admin.payloads configures which role may")
	}
	return nil
}
