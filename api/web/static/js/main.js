/** Entry point of the page. */

import { startDescription } from "./download.js";
import { startDrops } from "./files.js";
import { startKey } from "./key.js";
import { startRouter } from "./router.js";
import { startTheme } from "./theme.js";
import { compareView } from "./views/compare.js";
import { jobView } from "./views/job.js";
import { listView } from "./views/list.js";
import { newView } from "./views/new.js";
import { planView } from "./views/plan.js";

startTheme();
startKey();
startDescription();
startDrops();
startRouter({ plan: planView, new: newView, jobs: listView, job: jobView, compare: compareView });
