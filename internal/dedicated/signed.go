package dedicated

import (
	"errors"
	"fmt"

	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/userid"
)

// signed returns an encoded message as the user may publish it: another user's user-id
// becomes an annotation. All sections but these two stay as they are, byte for byte.
func signed(login *userid.Login, payload []byte) ([]byte, error) {
	sections, err := frames.SplitSections(payload)
	if err != nil {
		return payload, nil // the broker's to refuse
	}
	var id []byte
	for i, s := range sections {
		if s.Code != frames.SectionProperties {
			continue
		}
		m, err := frames.DecodeMessage(s.Raw)
		if err != nil {
			return nil, err
		}
		if m.Properties == nil || login.Accepts(m.Properties.UserID) {
			return payload, nil
		}
		id, m.Properties.UserID = m.Properties.UserID, nil
		if sections[i].Raw, err = (&frames.Message{Properties: m.Properties}).Append(nil); err != nil {
			return nil, err
		}
	}
	if id == nil {
		return payload, nil
	}
	head := frames.Message{}
	out := make([]byte, 0, len(payload)+len(id)+64)
	for _, s := range sections {
		if s.Code > frames.SectionAnnotations {
			break
		}
		m, err := frames.DecodeMessage(s.Raw)
		if err != nil {
			return nil, err
		}
		if m.Header != nil {
			head.Header = m.Header
		}
		if m.Annotations != nil {
			head.Annotations = m.Annotations
		}
	}
	head.Annotations = head.Annotations.Set(frames.Symbol(userid.Annotation), userid.Value(id))
	if out, err = head.Append(out); err != nil {
		return nil, err
	}
	for _, s := range sections {
		if s.Code > frames.SectionAnnotations {
			out = append(out, s.Raw...)
		}
	}
	return out, nil
}

// userIDError is the end of a link or a session over a user-id. What the user is called is
// known then, so that the next link doesn't end so.
type userIDError struct{ why error }

func (e *userIDError) Error() string { return e.why.Error() }

// ending is err with the broker's reason as a RefusedError. It learns from a refused user-id.
func (c *Conn) ending(err error) error {
	e, ok := errors.AsType[*amqp.Error](err)
	if !ok || e.Remote == nil {
		return err
	}
	why := fmt.Errorf("the broker ended the %v: %w", e.Scope, refusal(e.Remote))
	if e.Remote.Condition == "amqp:unauthorized-access" && c.login.Learn(e.Remote.Description) {
		return &userIDError{why}
	}
	return why
}
