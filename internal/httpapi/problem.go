package httpapi

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/logging"
)

// Problem is what the API answers where something is wrong (RFC 9457). It quotes nothing of the request: what was sent may
// hold a payload or a secret.
type Problem struct {
	Type   string         `json:"type,omitempty" doc:"The kind of problem, as about:blank or urn:outrelay:<kind>."`
	Title  string         `json:"title" doc:"What the status says."`
	Status int            `json:"status" doc:"The HTTP status."`
	Detail string         `json:"detail" doc:"What is wrong, with this request."`
	Hint   string         `json:"hint,omitempty" doc:"What to do about it."`
	Errors []ProblemPlace `json:"errors,omitempty" doc:"The places in the request that are wrong."`
}

// ProblemPlace is one place of a request that is wrong.
type ProblemPlace struct {
	Location string `json:"location,omitempty" doc:"Where, such as body.filter.class or query.limit."`
	Message  string `json:"message" doc:"What is wrong there."`
}

func (p *Problem) Error() string { return p.Detail }

// GetStatus is the HTTP status.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType is that of problems.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

func init() {
	huma.NewError = newProblem // the library has no other way to have its own errors look like ours
}

// newProblem makes the library's own errors problems, without the values that it quotes.
func newProblem(status int, detail string, errs ...error) huma.StatusError {
	p := &Problem{Title: http.StatusText(status), Status: status, Detail: logging.Clean(detail)}
	for _, err := range errs {
		if err == nil {
			continue
		}
		var place huma.ErrorDetailer
		if errors.As(err, &place) {
			d := place.ErrorDetail()
			p.Errors = append(p.Errors, ProblemPlace{d.Location, logging.Clean(d.Message)})
			continue
		}
		p.Errors = append(p.Errors, ProblemPlace{Message: logging.Clean(err.Error())})
	}
	switch status {
	case http.StatusUnprocessableEntity, http.StatusBadRequest:
		p.Hint = "mend what is listed; /api/openapi.json says what is allowed"
	case http.StatusRequestEntityTooLarge:
		p.Hint = "send less at once"
	}
	return p
}

var statusOf = map[admin.Failure]int{
	admin.FailInvalid:     http.StatusUnprocessableEntity,
	admin.FailNotFound:    http.StatusNotFound,
	admin.FailConflict:    http.StatusConflict,
	admin.FailChanged:     http.StatusPreconditionFailed,
	admin.FailForbidden:   http.StatusFailedDependency,
	admin.FailUnavailable: http.StatusServiceUnavailable,
}

// problemOf is the problem of an error of a use-case.
func problemOf(err error) error {
	if err == nil {
		return nil
	}
	var already huma.StatusError
	if errors.As(err, &already) {
		return already
	}
	kind, hint := admin.Explain(err)
	status := statusOf[kind]
	return &Problem{
		Type: "urn:outrelay:" + string(kind), Title: http.StatusText(status), Status: status, Hint: hint,
		Detail: logging.Clean(strings.ToValidUTF8(err.Error(), "\uFFFD")),
	}
}

// refusal is a problem of the API itself.
func refusal(status int, detail, hint string) error {
	return &Problem{Title: http.StatusText(status), Status: status, Detail: detail, Hint: hint}
}

// writeProblem answers outside of the API: a browser that opens a page gets text.
func writeProblem(w http.ResponseWriter, r *http.Request, status int, detail, hint string) {
	if !isAPI(r) && strings.Contains(r.Header.Get("Accept"), "text/html") {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(http.StatusText(status) + ": " + detail + "\n" + hint + "\n")) // a client that went away is not our concern
		return
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(Problem{Title: http.StatusText(status), Status: status, Detail: detail, Hint: hint}) // likewise
}
